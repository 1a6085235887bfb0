"""A loop written by hand goes on in mid-epoch on any ranks and layout; a part of the weights is not loaded as another."""

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tatami
from drawing import one_at_a_time
from tatami.checkpoints.state_codec import decode, encode
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import CheckpointError, InputError
from tatami.parallel import ResumableLoader, SynchronizedSampler
from tatami.tiling import Layout, StagedLayout
from tatami.train import ModelCheckpoint, TiledModel, Trainer, WeightAverage, whole_state_dict
from tiled_rig import assert_close, simple_layout, some_layouts, staged, tiled

pytestmark = [pytest.mark.ranks(2), pytest.mark.threads_only]

SAMPLES, BATCH, EPOCHS, SAVED_AT = 22, 8, 3, 4
"""Three batches an epoch: the checkpoint is in the middle of the second."""
FOUR_RANKS = simple_layout((1, 3), (0, 2), widths=(0.6, 0.4))
SAVED: dict[str, Layout | StagedLayout] = {
    "units": FOUR_RANKS,
    "sharded": some_layouts(4)[1],
    "stages": staged(4, stages=2, cuts=(1,)),
    "sharded stages": staged(4, stages=2, cuts=(1,)),
    "micro-batches": staged(4, stages=2, cuts=(1,), micro_batches=2),
}


@one_at_a_time
def network(*, normed: bool) -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3), nn.BatchNorm1d(3) if normed else nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()


NETWORK, WITHOUT_NORM = network(normed=True), network(normed=False)


class Loop:
    """A program of a user's: AdamW, a moving average, a schedule, shuffled epochs, and dropout."""

    def __init__(
        self, comm: AbstractCommunicator, layout: Layout | StagedLayout, plain: nn.Module, *, sharded: bool = False
    ) -> None:
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
        self.y = torch.rand(SAMPLES, 2, generator=draw, dtype=torch.float64)
        if isinstance(layout, StagedLayout):
            given = {"layout": layout, "sample": self.x[:4], "speeds": "equal", "reduction": "mean", "quiet": True}
            self.model = tatami.tile(plain, comm, batch_size=BATCH, sharded_optimizer=sharded, **given)  # type: ignore[arg-type]
        else:
            self.model = tiled(plain, comm, layout=layout, batch_size=BATCH, sharded_optimizer=sharded)
        self.model.generator.manual_seed(5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, eps=1e-6)
        self.average = WeightAverage(self.model.parameters(), decay=0.7)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=20)
        self.shuffling = torch.Generator().manual_seed(4)
        self.epoch, self.batch, self.step, self.losses = 0, 0, 0, [0.0]
        self.order = torch.randperm(SAMPLES, generator=self.shuffling)

    @property
    def objects(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "shuffling": self.shuffling}

    def save(self, folder: Path) -> None:
        values = {"epoch": self.epoch, "batch": self.batch, "order": self.order}
        tatami.save_training(folder, self.model, self.optimizer, step=self.step, objects=self.objects, values=values)

    def load(self, folder: Path) -> None:
        resumed = tatami.load_training(folder, self.model, self.optimizer, objects=self.objects)
        assert resumed is not None
        self.step, self.epoch, self.batch = resumed.step, resumed.state["epoch"], resumed.state["batch"]
        self.order = resumed.state["order"]
        assert (self.step, self.epoch, self.batch, resumed.ranks) == (SAVED_AT, 1, 1, 4)

    def train(self, *, until: int) -> None:
        while self.step < until:
            chosen = self.order[self.batch * BATCH : (self.batch + 1) * BATCH]
            x, y = self.model.local(self.x[chosen], self.y[chosen])
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.average.step()
            self.schedule.step()
            self.losses.append(self.model.global_loss(loss))
            self.step, self.batch = self.step + 1, self.batch + 1
            if self.batch * BATCH >= SAMPLES:
                self.epoch, self.batch, self.order = self.epoch + 1, 0, torch.randperm(SAMPLES, generator=self.shuffling)

    def result(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        return self.losses[1:], self.whole() | {f"average of {name}": each for name, each in self.averages().items()}

    def whole(self) -> dict[str, torch.Tensor]:
        whole: dict[str, torch.Tensor] = self.model.comm.bcast_object(whole_state_dict(self.model))
        return whole

    def averages(self) -> dict[str, torch.Tensor]:
        with self.average.applied():
            return self.whole()


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_run_of_four_ranks_goes_on_on_any_ranks_and_layout(
    size: int, saved: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With a sharded optimizer or without, whatever the run before had."""
    if "sharded" in saved:  # shards add in the order of the ranks, as messages do, and shared memory does not
        request.getfixturevalue("_sums_by_messages")
    in_parts = saved == "micro-batches"  # which batch normalization does not allow
    plain = WITHOUT_NORM if in_parts else NETWORK

    def straight(comm: AbstractCommunicator) -> Any:
        loop = Loop(comm, SAVED[saved], plain, sharded="sharded" in saved)
        averaged: dict[str, torch.Tensor] = {}
        for step in range(1, 10):
            loop.train(until=step)
            if step == SAVED_AT:
                loop.save(tmp_path)
            for name, value in loop.whole().items():
                if name in dict(plain.named_parameters()):
                    averaged[name] = 0.7 * averaged[name] + 0.3 * value if name in averaged else value
        for name, value in averaged.items():
            torch.testing.assert_close(loop.averages()[name], value, rtol=1e-12, atol=1e-14)
        return loop.result()

    (losses, weights), *_ = run_threads(straight, size=4)

    def resumed(comm: AbstractCommunicator, layout: Layout | StagedLayout, shards: bool) -> Any:
        loop = Loop(comm, layout, plain, sharded=shards)
        loop.load(tmp_path)
        loop.train(until=9)
        return loop.result()

    runs: list[tuple[Layout | StagedLayout, bool]] = [(layout, False) for layout in some_layouts(size)[-2:]]
    runs += [(staged(size, stages=2, cuts=(1,), micro_batches=1 + in_parts), False)] if size > 1 else []
    runs += [(some_layouts(size)[1 if size > 1 else 0], True)]
    runs += [(staged(size, stages=2, cuts=(1,), micro_batches=1 + in_parts), True)] if size == 4 else []
    for layout, shards in runs:
        for again, ended in run_threads(partial(resumed, layout=layout, shards=shards), size=size):
            # The layout of that time comes back, and every bit with it.
            if size == 4 and type(layout) is type(SAVED[saved]) and shards <= ("sharded" in saved):
                assert again == losses[SAVED_AT:]
                assert all(torch.equal(ended[name], value) for name, value in weights.items())
            else:
                assert again == pytest.approx(losses[SAVED_AT:], rel=1e-10)
                assert_close(ended, weights, what=f"{size} ranks, {layout}")


@pytest.mark.ranks(1)
def test_all_random_states_are_those_of_the_checkpoint(comm: AbstractCommunicator, tmp_path: Path) -> None:
    first = tiled(NETWORK, comm, layout=simple_layout((0,)), batch_size=BATCH)
    other = tiled(NETWORK, comm, layout=simple_layout((0,)), batch_size=BATCH)
    models = [first, other]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
    assert tatami.load_training(tmp_path, models, optimizers) is None
    tatami.save_training(tmp_path, models, optimizers, step=3)
    drawn = torch.rand(3), torch.rand(3, generator=other.generator)
    tatami.load_training(tmp_path, models, optimizers)
    again = torch.rand(3), torch.rand(3, generator=other.generator)
    assert all(torch.equal(*pair) for pair in zip(drawn, again, strict=True))


class Noisy(Dataset[torch.Tensor]):
    """Draws for every sample."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=self.generator, dtype=torch.float64) * index


@pytest.mark.parametrize("saved_at", [3, SAVED_AT])
@pytest.mark.ranks(1, 2)
def test_a_resumable_loader_and_its_loop_draw_what_they_would_have_drawn(
    comm: AbstractCommunicator, tmp_path: Path, saved_at: int
) -> None:
    """At the end of an epoch and within one; from torch's generator on one rank, from the DataLoader's where ranks share it."""
    own = torch.Generator() if comm.size > 1 else None
    generator = own or torch.default_generator
    alone = comm.split(comm.rank)
    assert alone is not None

    def train(seed: int, *, until: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        generator.manual_seed(seed)
        noisy, drawn = Noisy(generator), list[float]()
        sampler = SynchronizedSampler(noisy, alone)
        loader = ResumableLoader(DataLoader(noisy, batch_size=BATCH, sampler=sampler, generator=own))
        model = tiled(NETWORK, comm, layout=some_layouts(comm.size)[-1], batch_size=BATCH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.generator.manual_seed(5)
        objects = {"loader": loader} | ({"noise": own} if own is not None else {})
        resumed = tatami.load_training(tmp_path, model, optimizer, objects=objects)
        step = resumed.step if resumed else 0
        while step < until:
            for x in loader:
                loss = model(model.local(x)).square().sum() / BATCH
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                drawn += [model.global_loss(loss), torch.rand(1, generator=generator).item()]
                step += 1
                if step == until:
                    break
        if until == saved_at:
            tatami.save_training(tmp_path, model, optimizer, step=step, objects=objects)
        return drawn, comm.bcast_object(whole_state_dict(model))

    expected, weights = train(7, until=9)
    first, _ = train(7, until=saved_at)
    rest, ended = train(8, until=9)
    assert first + rest == expected
    assert all(torch.equal(ended[name], value) for name, value in weights.items())


def in_place(folder: Path, model: TiledModel, optimizer: torch.optim.Optimizer) -> None:
    with WeightAverage(model.parameters()).applied():
        tatami.save_training(folder, model, optimizer, step=2)


def with_state(folder: Path, model: TiledModel, optimizer: torch.optim.Optimizer) -> None:
    average = WeightAverage(model.parameters())
    average.step()
    checkpoint = ModelCheckpoint(dirpath=folder, every_n_train_steps=1)
    trainer = Trainer(model, optimizer=optimizer, loss=nn.MSELoss(), callbacks=[average], checkpoint=checkpoint)
    trainer.fit((torch.ones(BATCH, 4).double(), torch.ones(BATCH, 2).double()), batch_size=BATCH, epochs=1)


WRONG: dict[str, tuple[type[Exception], str, Callable[[Path, TiledModel, torch.optim.Optimizer], object]]] = {
    "objects": (
        CheckpointError,
        r"has the objects \[\], and load_training was given \['schedule'\]",
        lambda folder, model, optimizer: tatami.load_training(
            folder, model, optimizer, objects={"schedule": torch.Generator()}
        ),
    ),
    "models": (
        CheckpointError,
        "has 1 models, and 2 are to be loaded",
        lambda folder, model, optimizer: tatami.load_training(folder, [model, model], [optimizer, optimizer]),
    ),
    "optimizer": (
        CheckpointError,
        "this state is of SGD, and the optimizer is Adam",
        lambda folder, model, _: tatami.load_training(folder, model, torch.optim.Adam(model.parameters())),
    ),
    "average as an object": (
        InputError,
        r"objects=\{'average': ...\} is of this rank's part of the tiled model's weights.*Leave it out",
        lambda folder, model, optimizer: tatami.save_training(
            folder, model, optimizer, step=2, objects={"average": WeightAverage(model.parameters())}
        ),
    ),
    "state of an average": (
        InputError,
        "the state of a WeightAverage is of this rank's part of the tiled model's weights",
        lambda *given: (each := WeightAverage(given[1].parameters())).load_state_dict(each.state_dict()),
    ),
    "averages in place": (
        InputError,
        "saving a checkpoint comes within `with average.applied",
        lambda *given: in_place(*given),
    ),
    "callback": (
        InputError,
        "the state_dict of callback WeightAverage is of this rank's part|rank 0 has failed",
        lambda folder, model, optimizer: with_state(folder / "fit", model, optimizer),
    ),
    "one for two": (
        InputError,
        "2 models and 1 optimizers",
        lambda folder, model, optimizer: tatami.save_training(folder, [model, model], optimizer, step=1),
    ),
    "plain": (
        InputError,
        "a Sequential is not a tiled model",
        lambda folder, _, optimizer: tatami.save_training(folder, NETWORK, optimizer, step=1),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_would_be_loaded_wrongly_is_refused(comm: AbstractCommunicator, what: str, tmp_path: Path) -> None:
    kind, told, call = WRONG[what]
    model = tiled(NETWORK, comm, layout=simple_layout((0, 1)), batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tatami.save_training(tmp_path, model, optimizer, step=1)
    with pytest.raises(kind, match=told):
        call(tmp_path, model, optimizer)


@pytest.mark.parametrize(
    ("saved", "made", "told"), [(1, 0, "is dropped: make averages before"), (0, 1, "begins with the weights")]
)
def test_averages_without_a_counterpart_are_told_of(tmp_path: Path, saved: int, made: int, told: str) -> None:
    def body(comm: AbstractCommunicator) -> None:
        for number, call in ((saved, partial(tatami.save_training, step=1)), (made, tatami.load_training)):
            model = tiled(NETWORK, comm, layout=simple_layout((0, 1)), batch_size=BATCH)
            averages = [WeightAverage(model.parameters()) for _ in range(number)]
            for each in averages:
                each.step()
            call(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(not each.state for each in averages)

    with pytest.warns(UserWarning, match=f"has {saved} moving averages .*and the run has {made}; one .* {told}"):
        run_threads(body, size=2)


def test_a_state_dict_is_loaded_where_it_is_from_and_nowhere_else(comm: AbstractCommunicator, tmp_path: Path) -> None:
    """Also as a copy, through a file, and as an average; by a part of equal size, which fits in shape."""
    model = tiled(NETWORK, comm, layout=simple_layout((0, 1)), batch_size=BATCH)
    own = model.state_dict()
    theirs = comm.allgather_object(encode(own))[1 - comm.rank]
    averaged = {name: 0.3 * value + 0.7 * value.clone() for name, value in own.items()}
    for state in (own, copy.deepcopy(own), own.copy(), averaged, decode(encode(own))):
        model.load_state_dict(state)
    before = copy.deepcopy(model.state_dict())
    here = "0 to 3" if comm.rank == 0 else "4 to 7"
    with pytest.raises(CheckpointError, match=rf"units . to . of 8 of block 0, and this rank holds units {here} of 8"):
        model.load_state_dict(decode(theirs))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    store = tatami.MultiNodeCheckpoint(tmp_path, comm, replica_sets=[])
    with pytest.raises(CheckpointError, match="ranks 0 and 1 are said to hold the same state"):
        store.save(1, {"model": model.state_dict()})


@pytest.mark.parametrize(
    ("layout", "sharded", "differs"),
    [
        (simple_layout((0, 1)), False, r"{0} to {1} of 8, here {2} to {3} of 8"),
        (staged(2, stages=2, cuts=(1,)), False, r"{4} to {5} of 2, here {6} to {7} of 2"),
        (simple_layout((0,), (1,)), True, r"\d+ to \d+ of 1000000, here \d+ to \d+ of 1000000"),
        (simple_layout((0,), (1,)), False, None),
    ],
)
def test_an_optimizers_state_is_loaded_where_it_is_from_and_nowhere_else(
    comm: AbstractCommunicator, layout: Layout | StagedLayout, sharded: bool, differs: str | None
) -> None:
    """Into an optimizer that has not stepped, and without its note, as one from before there were any."""
    loop, saved = Loop(comm, layout, WITHOUT_NORM, sharded=sharded), io.BytesIO()
    loop.train(until=2)
    own = loop.optimizer.state_dict()
    assert len(own) == 2 + (differs is not None)
    torch.save(own, saved)
    mine, theirs = (torch.load(io.BytesIO(each), weights_only=True) for each in (saved.getvalue(), sent(comm, saved)))
    for state in (own, copy.deepcopy(own), mine, {key: own[key] for key in ("state", "param_groups")}):
        fresh = torch.optim.AdamW(loop.model.parameters())
        fresh.load_state_dict(state)
        assert fresh.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["lr"]
        for parameter, kept in loop.optimizer.state.items():
            assert torch.equal(fresh.state[parameter]["exp_avg"], kept["exp_avg"])
    if differs is None:
        fresh.load_state_dict(theirs)
        return
    order = (4, 8, 0, 4, 1, 2, 0, 1) if comm.rank == 0 else (0, 4, 4, 8, 0, 1, 1, 2)
    with pytest.raises(CheckpointError, match=differs.format(*order)):
        fresh.load_state_dict(theirs)
    plain = torch.optim.AdamW(copy.deepcopy(WITHOUT_NORM).parameters())
    for parameter in plain.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    if isinstance(layout, Layout) and not sharded:
        with pytest.raises(
            CheckpointError, match=r"has \(8, 4\) for a weight of which this rank holds \(4, 4\). It is of whole"
        ):
            fresh.load_state_dict(plain.state_dict())
    assert all(torch.equal(fresh.state[each]["exp_avg"], kept["exp_avg"]) for each, kept in loop.optimizer.state.items())
    if not isinstance(layout, Layout) or sharded:
        fresh.load_state_dict(plain.state_dict())


def sent(comm: AbstractCommunicator, saved: io.BytesIO) -> bytes:
    """What the other one of two ranks has saved."""
    theirs: bytes = comm.allgather_object(saved.getvalue())[1 - comm.rank]
    return theirs


def test_saving_a_part_of_the_weights_warns_at_the_line_that_saves(recwarn: pytest.WarningsRecorder) -> None:
    def body(comm: AbstractCommunicator) -> None:
        for layout in (simple_layout((0,), (1,)), simple_layout((0, 1))):
            saved = io.BytesIO()
            torch.save(tiled(NETWORK, comm, layout=layout, batch_size=BATCH).state_dict(), saved)
            saved.seek(0)
            assert torch.load(saved, weights_only=True)["module.3.bias"].shape == (3,)

    run_threads(body, size=2)
    (warning,) = [each for each in recwarn if "a part of the weights" in str(each.message)]
    assert warning.filename == __file__
