"""A model among other ranks than before, without Ray: ranks as threads, of which one is left out."""

import copy
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tatami
from tatami.cluster import Cluster
from tatami.comm import AbstractCommunicator, run_threads
from tatami.comm.elastic import ElasticCommunicator
from tatami.elastic.steps import Steps
from tatami.errors import InputError
from tatami.membership import Held, Regroup, mirrors_of, takes
from tatami.retiling import Retiler
from tatami.state.mirroring import MirrorTensors
from tatami.state.regroup import relay
from tatami.state.repairing import set_repairs
from tatami.tiling import Layout, Replica, StagedLayout
from tatami.train import Callback, ModelCheckpoint, Retiling, Trainer, WeightAverage, tile, whole_state_dict


def layout(*replicas: tuple[str, ...]) -> Layout:
    return Layout(
        replicas=tuple(
            Replica(width=1 / len(replicas), processors=names, heights=(1 / len(names),) * len(names)) for names in replicas
        )
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def staged(*replicas: str, cuts: tuple[int, ...], micro_batches: int = 1) -> StagedLayout:
    """Each replica is the names of its ranks, one for each stage."""
    widths = [(2 + number) / sum(range(2, 2 + len(replicas))) for number in range(len(replicas))]
    return StagedLayout(
        stages=tuple(
            Layout(
                replicas=tuple(
                    Replica(width=width, processors=(names[stage],), heights=(1.0,), micro_batches=micro_batches)
                    for width, names in zip(widths, replicas, strict=True)
                )
            )
            for stage in range(len(cuts) + 1)
        ),
        cuts=cuts,
    )


Journey = tuple[tuple[str, Layout | StagedLayout], ...]
JOURNEYS: dict[str, Journey] = {
    "from another replica": (("abc", layout(("a", "b"), ("c",))), ("bc", layout(("b", "c"))), ("c", layout(("c",)))),
    "to replicas of one": (("abc", layout(("a", "b"), ("c",))), ("ab", layout(("a",), ("b",)))),
    "to shared units": (("abc", layout(("a",), ("b",), ("c",))), ("ac", layout(("a", "c")))),
    "a member without a tile gets one again": (
        ("abc", layout(("a", "b"), ("c",))),
        ("abc", layout(("a",), ("b",))),
        ("abc", layout(("c", "a", "b"))),
    ),
    "from another replica, then from mirrors": (
        ("abcd", staged("ab", "cd", cuts=(2,), micro_batches=2)),
        ("abd", staged("dba", cuts=(1, 3), micro_batches=2)),
        ("ad", staged("da", cuts=(3,))),
    ),
    "to no stages and back": (
        ("abcd", staged("abc", cuts=(1, 3))),
        ("abd", layout(("a", "b"), ("d",))),
        ("bd", staged("bd", cuts=(2,), micro_batches=3)),
    ),
    "to one rank": (("abcd", staged("cab", cuts=(2, 3))), ("abd", staged("bad", cuts=(1, 2))), ("ab", layout(("b",)))),
}


class Tied(nn.Module):
    """A weight that two stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + number % 2, 5 - number % 2) for number in range(6))
        self.layers[4].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("journey", JOURNEYS.values(), ids=JOURNEYS.keys())
def test_weights_and_their_states_outlive_those_that_held_them(journey: Journey) -> None:
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    start = Tied().double()
    plain = copy.deepcopy(start)
    plain_optimizer, plain_average = torch.optim.AdamW(plain.parameters(), lr=0.1), WeightAverage(plain.parameters(), decay=0.5)
    for _ in range(2 * len(journey)):
        step(plain, plain_optimizer, x)
        plain_average.step()
    names = journey[0][0]
    together = threading.Barrier(len(names))

    def body(comm: AbstractCommunicator) -> tuple[dict[str, torch.Tensor], ...]:
        name = names[comm.rank]
        elastic = ElasticCommunicator(comm, names=tuple(names))
        model = tile(
            copy.deepcopy(start), elastic, batch_size=8, sample=x[:2], speeds="equal", layout=renamed(journey[0][1]),
            reduction="sum", quiet=True,
        )  # fmt: skip
        parameters = list(model.parameters())
        optimizer, average = torch.optim.AdamW(parameters, lr=0.1), WeightAverage(parameters, decay=0.5)
        is_behind = False  # with its average, as a rank is that learns only in a repair that an update was made
        mirror, members, inner, held = MirrorTensors(), tuple(names), comm, Held(layout=journey[0][1])
        for number, (alive, after) in enumerate(journey):
            survivors = inner if number == 0 else inner.split(0 if name in alive else None, key=inner.rank)
            together.wait(60)
            if survivors is None:
                for _ in journey[number + 1 :]:
                    together.wait(60)
                return ()
            members, inner = tuple(alive), survivors
            if number:
                elastic.regroup(survivors, names=members)
            workload = model.workload if model.staged is None else model.staged.workload
            now = Held(layout=after, mirrors=mirrors_of(after, copies=2))
            found, lost = takes(held, now, workload=workload, sources=members)
            assert lost == ()
            change = Regroup(
                ticket=number, group=number, members=members, sections=0, finish=(), outcome=None, newcomers=(),
                source=members[0], layout=after, mirrors=now.mirrors, takes=found, reason="",
            )  # fmt: skip
            by_name = model.cluster.by_name
            cluster = Cluster(processors=tuple(by_name[each] for each in members))
            with nullcontext() if is_behind else average.applied():
                relay(model, change, name=name, cluster=cluster, optimizer=optimizer, mirror=mirror)()
            if is_behind:
                average.step()
            held = now
            for update in range(2):
                optimizer.zero_grad()
                for part in model.micro_batches(x):
                    model(part).square().sum().backward()
                keeper = next((each.keeper for each in now.mirrors if each.owner == name), None)
                owner = next((each.owner for each in now.mirrors if each.keeper == name), None)
                if keeper is not None and owner is not None:
                    mirror.exchange(elastic, keeper=members.index(keeper), owner=members.index(owner))
                optimizer.step()
                is_behind = update == 1 and name == members[-1] and number + 1 < len(journey)
                if not is_behind:
                    average.step()
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        whole = whole_state_dict(model)
        with average.applied():
            return whole, whole_state_dict(model)

    def renamed(given: Layout | StagedLayout) -> Layout | StagedLayout:
        return given.renamed({name: f"p{rank}" for rank, name in enumerate(names)})

    ((whole, averaged),) = [states for states in run_threads(body, size=len(names)) if any(states)]
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(whole[key], tensor, rtol=1e-10, atol=1e-10, msg=f"{key} differs")
    with plain_average.applied():
        for key, tensor in plain.state_dict().items():
            torch.testing.assert_close(averaged[key], tensor, rtol=1e-10, atol=1e-10, msg=f"the average of {key} differs")


def test_what_does_not_follow_changes_of_the_ranks_is_refused() -> None:
    def body(inner: AbstractCommunicator) -> None:
        model = tile(
            Tied().double(), ElasticCommunicator(inner, names=("a", "b")), batch_size=4, speeds=(1, 1), reduction="mean"
        )
        with pytest.raises(InputError, match="Retiling cannot be used in an elastic run"):
            Retiling(model, torch.optim.SGD(model.parameters(), lr=0.1), retiler=Retiler())
        average = WeightAverage(model.parameters())
        with pytest.raises(InputError, match=r"carry=\{'average': ...\} is of this rank's part of the tiled model's weights"):
            tatami.steps(model, average, count=1, carry={"average": average})
        sgd, x = partial(torch.optim.SGD, lr=0.1), torch.ones(4, 4, dtype=torch.float64)
        with pytest.raises(InputError, match=r"Trainer\(retile=...\) cannot be used in an elastic run"):
            Trainer(model, optimizer=sgd, loss=nn.MSELoss(), retile=Retiler())
        with pytest.raises(InputError, match=r"ModelCheckpoint\(copies=...\) cannot be used in an elastic run"):
            Trainer(model, optimizer=sgd, loss=nn.MSELoss(), checkpoint=ModelCheckpoint(dirpath=".", copies=1))
        with pytest.raises(InputError, match="no elastic run repairs it"):
            Trainer(model, optimizer=sgd, loss=nn.MSELoss()).fit((x, x), batch_size=4, iterations=1)

    run_threads(body, size=2)


class Begins(Callback):
    """Counts epochs and halves the learning rate where they begin; keeps the state of the Trainer after two updates."""

    def __init__(self, *, evaluates: bool = False) -> None:
        self.epochs, self.evaluates, self.state = 0, evaluates, dict[str, Any]()

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self.epochs += 1
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
        if self.evaluates:
            trainer.evaluate((torch.ones(4, 4).double(), torch.ones(4, 4).double()), batch_size=4)

    def on_train_batch_end(self, trainer: Trainer, loss: float) -> None:  # noqa: ARG002
        if trainer.iteration == 2:
            run: Any = trainer._run
            self.state = copy.deepcopy({**run.state_dict(), "lr": trainer.optimizer.param_groups[0]["lr"]})

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def test_a_rank_begins_an_epoch_as_the_others_have_and_goes_back_to_the_folder_that_the_run_came_from(tmp_path: Path) -> None:
    """By repairs that let one rank join, or go back, without a death; three updates an epoch."""

    class Told(Steps):
        gives: dict[str, Any]
        joins = returns = False

        def enter(self) -> None:
            if self.joins:
                self._carry["fit"].load_state_dict(self.gives)
                self.optimizer.param_groups[0]["lr"] = self.gives["lr"]

    def body(inner: AbstractCommunicator) -> None:
        def fit(begins: Begins, *, joins: Any = None, returns: bool = False, **options: Any) -> Trainer:
            def make(model: Any, optimizer: Any, state: Any) -> Told:
                told = Told(model, optimizer, count=0, carry={"fit": state}, session=None, put_back=state.put_back)
                told.gives, told.joins, told.returns = joins, joins is not None, returns
                return told

            elastic = ElasticCommunicator(inner, names=("a",))
            model = tile(nn.Linear(4, 4).double(), elastic, batch_size=4, speeds="equal", reduction="mean", quiet=True)
            checkpoint = ModelCheckpoint(dirpath=tmp_path) if options.pop("saves", False) else None
            sgd, x = partial(torch.optim.SGD, lr=1.0), torch.ones(12, 4, dtype=torch.float64)
            trainer = Trainer(model, optimizer=sgd, loss=nn.MSELoss(), callbacks=[begins], checkpoint=checkpoint)
            set_repairs(make)
            try:
                trainer.fit((x, x), batch_size=4, **options)
            finally:
                set_repairs(None)
            return trainer

        fit(first := Begins(), iterations=5, saves=True)
        trainer = fit(new := Begins(), joins=first.state, iterations=5)
        assert (trainer.iteration, new.epochs, trainer.optimizer.param_groups[0]["lr"]) == (5, 2, 0.25)
        trainer = fit(old := Begins(), returns=True, resume=tmp_path, iterations=7)
        assert (trainer.iteration, old.epochs, trainer.optimizer.param_groups[0]["lr"]) == (7, 3, 0.125)
        with pytest.raises(InputError, match=r"a callback calls evaluate.* in on_train_epoch_start, which a rank that joins"):
            fit(Begins(evaluates=True), iterations=5)

    run_threads(body, size=1)
