"""Batches of any structure, from anything that gives batches: the losses and parameters are those of the plain loop."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import check_fit, plain_fit
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from drawing import one_at_a_time
from tatami.batch import cut_batch, samples_of
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.parallel import MultiNodeLoader, ResumableLoader, SynchronizedSampler
from tatami.testing.worlds import World
from tatami.tiling import Span
from tatami.train import History, Trainer
from tatami.train.loaded_batches import LoadedBatches
from tiled_rig import assert_close, some_layouts, tiled

SAMPLES, BATCH = 22, 8
"""Batches of 8, 8 and 6."""
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9)


class TwoInputs(nn.Module):
    """Takes two named inputs; where it is given labels, it has its loss in its output, as networks of Hugging Face."""

    @one_at_a_time
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))

    def forward(self, x: torch.Tensor, shift: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(x + shift[:, None])
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def network() -> nn.Module:
    return TwoInputs().double()


def table() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),
        "shift": torch.randn(SAMPLES, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, (SAMPLES,), generator=generator),
    }


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A sample is a dict."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[index] for key, value in table().items()}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = Rows()
        return iter(rows[index] for index in range(len(rows)))


class Counted(Stream):
    """Samples that are not indexed, but counted."""

    def __len__(self) -> int:
        return SAMPLES


def plain_batches() -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, SAMPLES, BATCH):
        yield {key: value[start : start + BATCH] for key, value in table().items()}


def check(world: World, batches: Any, fit: Callable[[Any, AbstractCommunicator], History]) -> None:
    """On every layout, `fit(model)` gives the losses and the parameters of a plain run over these batches."""
    expected = plain_fit(network(), batches, loss=lambda model, batch: model(**batch)["loss"], optimizer=SGD)
    check_fit(world, network(), expected, fit, batch_size=BATCH, reduction=None)


def shuffled() -> Any:
    return DataLoader(Rows(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


class Streamed:
    """Batches without a length, which begin again with every epoch."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return plain_batches()


SOURCES: dict[str, Callable[[AbstractCommunicator], tuple[Any, dict[str, Any]]]] = {
    "tensors": lambda _: (table(), {"batch_size": BATCH, "shuffle": False}),
    "map-style": lambda _: (Rows(), {"batch_size": BATCH, "shuffle": False}),
    "iterable data set": lambda _: (Stream(), {"batch_size": BATCH}),
    "iterable data set with a length": lambda _: (Counted(), {"batch_size": BATCH}),
    "DataLoader": lambda _: (DataLoader(Rows(), batch_size=BATCH), {}),
    "iterable": lambda _: (Streamed(), {}),
    "from one rank": lambda comm: (MultiNodeLoader(Streamed() if comm.rank == 0 else None, comm), {}),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.ranks(1, 3)
def test_dicts_and_the_networks_own_loss(world: World, source: str) -> None:
    def fit(model: Any, comm: AbstractCommunicator) -> History:
        data, options = SOURCES[source](comm)
        return Trainer(model, optimizer=SGD, reduction="mean").fit(data, epochs=2, **options)

    check(world, [*plain_batches(), *plain_batches()], fit)


def test_a_loader_that_shuffles_by_a_generator(world: World) -> None:
    def fit(model: Any, comm: AbstractCommunicator) -> History:
        del comm
        return Trainer(model, optimizer=SGD, reduction="mean").fit(shuffled(), epochs=2)

    loader = shuffled()
    check(world, [*loader, *loader], fit)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["resumable", "from one rank", "iterator"])
def test_what_a_limit_leaves_is_for_the_next_fit(comm: AbstractCommunicator, kind: str) -> None:
    """A batch is drawn ahead, but given back; of an iterator, which cannot take it back, it is not drawn."""
    alone = comm.split(comm.rank)
    assert alone is not None
    resumable = ResumableLoader(DataLoader(Rows(), batch_size=BATCH, sampler=SynchronizedSampler(Rows(), alone, shuffle=False)))
    sources: dict[str, Any] = {
        "resumable": resumable,
        "from one rank": MultiNodeLoader(resumable if comm.rank == 0 else None, comm),
        "iterator": plain_batches(),
    }
    model = tiled(network(), comm, layout=some_layouts(comm.size)[0], batch_size=BATCH, reduction=None)
    trainer = Trainer(model, optimizer=SGD, reduction="mean")
    losses = [trainer.fit(sources[kind], iterations=1).losses[0] for _ in range(3)]
    expected = plain_fit(network(), plain_batches(), loss=lambda model, batch: model(**batch)["loss"], optimizer=SGD)
    assert losses == pytest.approx(expected[0], rel=1e-10)


def cross_entropy(output: dict[str, torch.Tensor], target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(output["logits"], target, reduction=reduction)


def step(model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, shift, labels = batch
    return F.cross_entropy(model(x, shift=shift)["logits"], labels)


@pytest.mark.parametrize("kind", ["target of a dict", "last of a tuple", "inputs as a tuple", "inputs as a dict", "by hand"])
@pytest.mark.ranks(2, 4)
def test_who_computes_the_loss(world: World, kind: str) -> None:
    x, shift, labels = table().values()

    def fit(model: Any, comm: AbstractCommunicator) -> History:
        del comm
        data: Any = {
            "target of a dict": table(),
            "last of a tuple": (x, shift, labels),
            "inputs as a tuple": ((x, shift), labels),
            "inputs as a dict": ({"x": x, "shift": shift}, labels),
            "by hand": (x, shift, labels),
        }[kind]
        if kind == "by hand":
            trainer = Trainer(model, optimizer=SGD, training_step=step, reduction="mean")
        else:
            trainer = Trainer(model, optimizer=SGD, loss=cross_entropy, target="labels")
        return trainer.fit(data, batch_size=BATCH, epochs=2, shuffle=False)

    check(world, [*plain_batches(), *plain_batches()], fit)


@pytest.mark.ranks(1, 2)
def test_evaluation_and_prediction_of_dicts_and_loaders(comm: AbstractCommunicator) -> None:
    built = network()
    with torch.no_grad():
        whole = built(**table())
    right = float((whole["logits"].argmax(-1) == table()["labels"]).double().mean())
    inputs = {key: value for key, value in table().items() if key != "labels"}

    def near(output: dict[str, torch.Tensor], target: torch.Tensor) -> float:
        return float((output["logits"].argmax(-1) == target).double().mean())

    for layout in some_layouts(comm.size):
        model = tiled(built, comm, layout=layout, batch_size=BATCH, reduction=None)
        trainer = Trainer(model, optimizer=SGD, loss=cross_entropy, target="labels")
        values = trainer.evaluate(DataLoader(Rows(), batch_size=5), metrics={"near": near})
        assert values == pytest.approx({"loss": whole["loss"].item(), "near": right}, rel=1e-10)
        for data, size in ((table(), 5), (inputs, SAMPLES), (DataLoader(Rows(), batch_size=5), None), (Stream(), 7)):
            assert_close(trainer.predict(data, batch_size=size), {"logits": whole["logits"]}, what="prediction")
        assert model.training


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_told_is_refused_by_name(comm: AbstractCommunicator) -> None:
    built = network()
    x, shift, _ = table().values()
    fit = {"batch_size": BATCH, "epochs": 1}
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=BATCH, reduction=None)
    make = partial(Trainer, model, optimizer=SGD)
    for options, match in (
        ({}, r"the network's own loss does not tell whether it takes the mean or the sum.*reduction='mean' or"),
        ({"training_step": step}, "a training_step does not tell"),
        ({"training_step": step, "loss": cross_entropy}, "a loss or a training_step.*not both"),
        ({"reduction": "none"}, "reduction must be 'mean' or 'sum'"),
    ):
        with pytest.raises(InputError, match=match):
            make(**options)
    cases: list[tuple[dict[str, Any], Any, dict[str, Any], str]] = [
        ({"loss": cross_entropy}, table(), fit, "a dict of x, shift, labels; say which of them is the target"),
        ({"loss": cross_entropy, "target": "y"}, table(), fit, "none of them is target='y'"),
        (
            {"loss": cross_entropy, "target": "labels"},
            {"wrong": x, "labels": table()["labels"]},
            fit,
            "a batch is a dict, so the network is called with wrong by name, and .* does not take them",
        ),
        ({"loss": cross_entropy}, x, fit, r"a pair \(inputs, targets\) for the loss, not a Tensor"),
        ({"reduction": "mean"}, (x, shift), fit, "the network returns a dict without a `loss`"),
        ({"training_step": lambda *_: x, "reduction": "mean"}, x, fit, r"returned a Tensor of shape \(22, 4\)"),
        ({"reduction": "mean"}, table(), {"epochs": 1}, "say batch_size"),
        ({"reduction": "mean"}, Stream(), {"epochs": 1}, "an IterableDataset gives single samples: say batch_size"),
        ({"reduction": "mean"}, DataLoader(Rows()), fit, "a DataLoader gives whole batches.*leave batch_size out"),
        ({"reduction": "mean"}, {**table(), "x": x[:-1]}, fit, r"the same number of samples, not \[21, 22\]"),
        ({"reduction": "mean"}, [], fit, "the data set is empty"),
        ({"reduction": "mean"}, iter([]), {"epochs": 1}, "the data gave no batch in epoch 0"),
        ({"reduction": "mean"}, plain_batches(), {"epochs": 2}, "no batch in epoch 1; an iterator can be gone"),
        ({"reduction": "mean"}, iter([{"x": object()}]), {"epochs": 1}, r"batch\['x'\] is a object, which cannot be cut"),
        ({"reduction": "mean"}, 3, {"epochs": 1}, "data must be tensors .*, not a int"),
    ]
    for options, data, given, match in cases:
        with pytest.raises(InputError, match=match):
            make(**options).fit(data, **given)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("replicas", [False, True])
def test_loaders_that_differ_are_found(comm: AbstractCommunicator, replicas: bool) -> None:
    """Also where each rank is a replica of its own, because every rank has loaded the whole batch."""
    built = network()
    last = comm.size - 1
    other = comm.rank == last
    layout = some_layouts(comm.size)[1 if replicas else 0]

    def loader(seed: int) -> Any:
        return DataLoader(Rows(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed))

    def trainer() -> Trainer:
        return Trainer(tiled(built, comm, layout=layout, batch_size=BATCH, reduction=None), optimizer=SGD, reduction="mean")

    with pytest.raises(InputError, match=f"different batches: rank {last} has other samples than rank 0"):
        trainer().fit(loader(5 if other else 3), epochs=1)
    short = list(plain_batches())[: 2 if other else 3]
    with pytest.raises(InputError, match=rf"in epoch 0, those of rank {last} end after batch 2, those of rank 0 do not"):
        trainer().fit(iter(short), epochs=1)
    with pytest.raises(InputError, match=rf"those of rank {last} end after batch 2"):
        trainer().evaluate(iter(short))
    with pytest.raises(InputError, match=rf"those of rank {last} end after batch 0"):
        trainer().fit(iter([] if other else short), epochs=1)


def test_a_batch_is_cut_in_its_structure() -> None:
    x = torch.arange(12).view(4, 3)
    batch = {"x": x, "more": [x[:, 0], {"names": ["a", "b", "c", "d"]}], "scale": torch.tensor(2.0), "kind": "text", "n": 4}
    part = cut_batch(batch, Span(1, 3), samples=samples_of(batch))
    assert torch.equal(part["x"], x[1:3])
    assert torch.equal(part["more"][0], x[1:3, 0])
    assert part["more"][1] == {"names": ["b", "c"]}
    assert (part["scale"].item(), part["kind"], part["n"]) == (2.0, "text", 4)
    with pytest.raises(InputError, match="a batch must have a tensor"):
        samples_of({"n": 4})


@pytest.mark.ranks(1)
def test_a_rank_that_joins_an_elastic_run_in_mid_epoch_draws_without_the_others(comm: AbstractCommunicator) -> None:
    model = tiled(network(), comm, layout=some_layouts(1)[0], batch_size=BATCH)
    alone: Any = SimpleNamespace(comm=SimpleNamespace(changes=True), phases=model.phases, take=model.take)  # sends nothing
    data, expected = Rows(), table()["x"]
    batches = LoadedBatches(DataLoader(data, batch_size=BATCH))
    batches.begin_again()
    batches.seek({**batches.position(), "start": batches.position()["now"]})
    drawn = list(batches.epoch(0, alone, skip=1))
    assert [batch.is_last for batch in drawn] == [False, True]
    assert torch.equal(torch.cat([batch.here["x"] for batch in drawn]), expected[BATCH:])
    sampler = SynchronizedSampler(data, comm)
    LoadedBatches(ResumableLoader(DataLoader(data, batch_size=BATCH, sampler=sampler))).begin_again()
    with pytest.raises(InputError, match=r"the DataLoader's SynchronizedSampler counts its epochs.*ResumableLoader\(loader\)"):
        LoadedBatches(DataLoader(data, batch_size=BATCH, sampler=sampler)).begin_again()
