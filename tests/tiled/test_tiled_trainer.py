"""The Trainer is the loop that one would write by hand: same losses, parameters and evaluation; and it learns real data."""

import json
import os
import resource
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import Fitted, check_fit, plain_fit
from torch import nn

from drawing import one_at_a_time
from hand_clock import HandClock
from tatami.comm.base import AbstractCommunicator
from tatami.comm.threads import single_communicator
from tatami.errors import InputError, OutputExistsError
from tatami.records import Records
from tatami.retiling import Retiler
from tatami.testing.worlds import World
from tatami.train import Callback, History, TiledModel, Trainer, tile
from tatami.train.recording import RunRecorder
from tiled_rig import some_layouts, tiled

SAMPLES = 23
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9)


@one_at_a_time
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),
        torch.rand(SAMPLES, 2, generator=generator, dtype=torch.float64),
    )


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same data, one sample at a time; notes which ones were asked for."""

    def __init__(self) -> None:
        self.x, self.y = inputs()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(index)
        return self.x[index], self.y[index]


def fitted(
    *,
    batch_size: int,
    epochs: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.mse_loss,
    seed: int | None,
    scheduler: Any = None,
    clip_norm: float | None = None,
) -> Fitted:
    """By the plain loop, over batches in the Trainer's order."""
    x, y = inputs()
    orders = [
        torch.arange(SAMPLES)
        if seed is None
        else torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch))
        for epoch in range(epochs)
    ]
    batches = [(x[here], y[here]) for order in orders for here in torch.split(order, batch_size)]
    schedules: list[Any] = []

    def after(optimizer: torch.optim.Optimizer, updates: int) -> None:
        if scheduler and not schedules:
            schedules.append(scheduler(optimizer))
        if scheduler and updates % (len(batches) // epochs) == 0:
            schedules[0].step()

    return plain_fit(
        network(),
        batches,
        loss=lambda model, batch: loss(model(batch[0]), batch[1]),
        optimizer=SGD,
        clip_norm=clip_norm,
        after=after,
    )


def check(world: World, expected: Fitted, fit: Callable[[Any], tuple[Trainer, History]]) -> None:
    """On every layout, `fit(model)` gives the losses and the parameters of the plain run."""

    def fits(model: TiledModel, _: AbstractCommunicator) -> History:
        trainer, history = fit(model)
        assert len(history.iteration_s) == len(history.losses) == trainer.iteration
        return history

    check_fit(world, network(), expected, fits, batch_size=SAMPLES)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum"), F.mse_loss])
def test_full_batches(world: World, loss: Any) -> None:
    def fit(model: Any) -> tuple[Trainer, History]:
        trainer = Trainer(model, optimizer=SGD, loss=loss, gradient_clip_val=0.5)
        return trainer, trainer.fit(inputs(), batch_size=SAMPLES, epochs=4)

    check(world, fitted(batch_size=SAMPLES, epochs=4, loss=loss, seed=None, clip_norm=0.5), fit)


def test_shuffled_batches_with_a_scheduler(world: World) -> None:
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)

    def fit(model: Any) -> tuple[Trainer, History]:
        trainer = Trainer(model, optimizer=SGD, loss=nn.MSELoss(), scheduler=scheduler, seed=5)
        first = trainer.fit(inputs(), batch_size=11, epochs=2)  # batches of 11, 11 and 1
        again = trainer.fit(inputs(), batch_size=11, epochs=1)  # one more epoch, not up to the first
        assert (trainer.epoch, again.stopped) == (3, "epochs")
        return trainer, History(losses=first.losses + again.losses, iteration_s=first.iteration_s + again.iteration_s)

    check(world, fitted(batch_size=11, epochs=3, seed=5, scheduler=scheduler), fit)


@pytest.mark.parametrize("shuffle", [False, True])
def test_map_style_data_of_which_each_rank_fetches_its_own(world: World, shuffle: bool) -> None:
    def fit(model: Any) -> tuple[Trainer, History]:
        data = Samples()
        trainer = Trainer(model, optimizer=SGD, loss=nn.MSELoss(), seed=5)
        history = trainer.fit(data, batch_size=10, epochs=2, shuffle=shuffle)
        if model.tile is not None and len(model.tiling.replicas) > 1:
            assert len(data.asked) < 2 * SAMPLES
        return trainer, history

    check(world, fitted(batch_size=10, epochs=2, seed=5 if shuffle else None), fit)


@pytest.mark.parametrize("retile", [None, Retiler(every=1)])
def test_an_optimizer_may_be_given_ready_made(world: World, retile: Retiler | None) -> None:
    def fit(model: Any) -> tuple[Trainer, History]:
        trainer = Trainer(model, optimizer=SGD(model.parameters()), loss=nn.MSELoss(), seed=5, retile=retile)
        return trainer, trainer.fit(inputs(), batch_size=11, epochs=2)

    check(world, fitted(batch_size=11, epochs=2, seed=5), fit)


@pytest.mark.ranks(1, 2)
def test_an_optimizer_of_the_plain_network_is_refused(comm: AbstractCommunicator) -> None:
    built = network()
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    with pytest.raises(InputError, match=r"the optimizer has \d+ parameters that are not the tiled model's.*after model ="):
        Trainer(model, optimizer=SGD(network().parameters()), loss=nn.MSELoss())


@pytest.mark.parametrize("seed", [2**64 - 1, 0])
@pytest.mark.ranks(1, 2)
def test_every_seed_shuffles(comm: AbstractCommunicator, seed: int) -> None:
    """The seed of an epoch is `seed + epoch`, which must not leave the numbers that torch takes."""
    built = network()
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=11)
    history = Trainer(model, optimizer=SGD, loss=nn.MSELoss(), seed=seed).fit(inputs(), batch_size=11, epochs=2)
    assert len(history.losses) == 6
    for wrong in (-1, 2**64):
        with pytest.raises(InputError, match=rf"a seed must be a whole number from 0 to 2\*\*64 - 1, not {wrong}"):
            Trainer(model, optimizer=SGD, loss=nn.MSELoss(), seed=wrong)


def test_it_stops_where_it_is_told(comm: AbstractCommunicator) -> None:
    losses, _ = fitted(batch_size=SAMPLES, epochs=6, seed=None)
    built = network()

    def train(**stop: Any) -> History:
        model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
        return Trainer(model, optimizer=SGD, loss=nn.MSELoss()).fit(inputs(), batch_size=SAMPLES, **stop)

    below = train(stop_below=losses[3] + 1e-9)
    first = next(index for index, loss in enumerate(losses) if loss < losses[3] + 1e-9)
    assert (len(below.losses), below.stopped) == (first + 1, "loss")
    by_iterations = train(epochs=5, iterations=2)
    assert (len(by_iterations.losses), by_iterations.stopped) == (2, "iterations")
    for stop, match in (
        ({}, "say when to stop"),
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"iterations": -1}, "iterations must be at least 1, not -1"),
        ({"stop_below": float("nan")}, "stop_below must be a finite number, not nan"),
        ({"stop_below": float("inf")}, "stop_below must be a finite number, not inf"),
    ):
        with pytest.raises(InputError, match=match):
            train(**stop)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_evaluation_weighs_by_samples(comm: AbstractCommunicator, reduction: str) -> None:
    built, (x, y) = network(), inputs()
    loss = nn.MSELoss(reduction=reduction)
    output = built(x).detach()
    expected = {"loss": loss(output, y).item(), "near": float(((output - y).abs().amax(1) < 0.5).double().mean())}

    def near(output: torch.Tensor, target: torch.Tensor) -> float:
        return float(((output - target).abs().amax(1) < 0.5).double().mean())

    for layout in some_layouts(comm.size):
        model = tiled(built, comm, layout=layout, batch_size=SAMPLES)
        trainer = Trainer(model, optimizer=SGD, loss=loss)
        model.eval()
        values = trainer.evaluate((x, y), batch_size=9, metrics={"near": near})
        assert values == pytest.approx(expected, rel=1e-10)
        assert not model.training
        history = trainer.fit((x, y), batch_size=9, epochs=2, validation=(x, y), metrics={"near": near})
        assert len(history.validation) == 2
        assert history.validation[-1] == pytest.approx(trainer.evaluate((x, y), batch_size=SAMPLES, metrics={"near": near}))


@pytest.mark.ranks(1, 2)
def test_a_network_that_is_not_tiled_predicts_from_inputs_alone(comm: AbstractCommunicator) -> None:
    built, (x, y) = network(), inputs()
    expected = built(x).detach()
    data: list[tuple[Any, int | None]] = [(x, 9), ((x,), 9), ((x, y), 9), ([x[:9], x[9:18], x[18:]], None)]
    for each, batch_size in data:
        trainer = Trainer(built, comm=comm, optimizer=SGD, loss=nn.MSELoss(), tile=partial(tile, speeds="equal", quiet=True))
        torch.testing.assert_close(trainer.predict(each, batch_size=batch_size), expected)


def test_a_list_of_batches_is_an_iterable_of_batches(comm: AbstractCommunicator) -> None:
    built, (x, y) = network(), inputs()
    batches = [(x[at : at + 9], y[at : at + 9]) for at in range(0, SAMPLES, 9)]
    found = []
    for data in (batches, iter(batches)):
        trainer = Trainer(
            tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=9), optimizer=SGD, loss=nn.MSELoss()
        )
        losses = trainer.fit(data, epochs=1).losses
        found.append((losses, trainer.evaluate(batches)["loss"]))
    assert found[0] == found[1]
    history = trainer.fit(batches, epochs=1, validation=batches)
    assert history.validation[0]["loss"] == pytest.approx(trainer.evaluate((x, y), batch_size=SAMPLES)["loss"])
    with pytest.raises(InputError, match="say batch_size"):
        trainer.fit([(x[0], 1.0), (x[1], 2.0), (x[2], 0.0)], epochs=1)
    with pytest.raises(InputError, match=r"metrics \(accuracy\) are of the validation, and there is none"):
        trainer.fit(batches, epochs=1, metrics=["accuracy"])


def test_an_evaluation_between_iterations_is_in_no_iteration(comm: AbstractCommunicator) -> None:
    """Its tensor-parallel sums would lengthen the t1 of the next one."""
    built = network()
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    model.phases.clock = HandClock(step_s=1.0)
    Trainer(model, optimizer=SGD, loss=nn.MSELoss()).evaluate(inputs(), batch_size=9)
    assert model.phases.finish_iteration().total_s == 0


@pytest.mark.ranks(1, 2)
def test_losses_that_the_parts_do_not_make_up_are_refused(comm: AbstractCommunicator) -> None:
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    built = network()
    cases: list[tuple[Any, str]] = [
        (nn.CrossEntropyLoss(weight=weight), "CrossEntropyLoss with class weights"),
        (partial(F.cross_entropy, weight=weight), "cross_entropy with class weights"),
        (nn.NLLLoss(weight=weight), "NLLLoss with class weights"),
        (nn.MSELoss(reduction="none"), "'mean' or 'sum', not by 'none'"),
    ]
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    for loss, match in cases:
        with pytest.raises(InputError, match=match):
            Trainer(model, optimizer=SGD, loss=loss)
    Trainer(model, optimizer=SGD, loss=nn.CrossEntropyLoss(weight=weight, reduction="sum"))
    Trainer(model, optimizer=SGD, loss=nn.BCEWithLogitsLoss(pos_weight=weight))


@pytest.mark.ranks(1)
def test_data_that_can_not_be(comm: AbstractCommunicator) -> None:
    x, y = inputs()
    trainer = Trainer(tiled(network(), comm, layout=some_layouts(1)[0], batch_size=4), optimizer=SGD, loss=nn.MSELoss())
    for data, batch_size, match in (
        ((x, y[:-1]), 4, "23 inputs but 22 targets"),
        ((x[:0], y[:0]), 4, "the data set is empty"),
        ((x, y), 0, "batch_size must be at least 1, not 0"),
    ):
        with pytest.raises(InputError, match=match):
            trainer.fit(data, batch_size=batch_size, epochs=1)
    for wrong, match in (
        (3, r"data must be tensors \(a pair of inputs and targets, a tuple or a dict\), a data set with .* not a int"),
        ((x.numpy(), y.numpy()), r"data must be a pair of tensors \(inputs, targets\), not \(ndarray, ndarray\)"),
    ):
        for use in (
            lambda wrong: trainer.fit(wrong, batch_size=4, epochs=1),
            lambda wrong: trainer.fit((x, y), batch_size=4, epochs=1, validation=wrong),
            lambda wrong: trainer.evaluate(wrong, batch_size=4),
        ):
            with pytest.raises(InputError, match=match):
                use(wrong)
    with pytest.raises(InputError, match="the validation data set is empty"):
        trainer.fit((x, y), batch_size=4, epochs=1, validation=(x[:0], y[:0]))
    assert trainer.iteration == 0


@pytest.mark.ranks(1, 2)
def test_records_and_progress_are_those_of_rank_0(comm: AbstractCommunicator, tmp_path: Path) -> None:
    losses, _ = fitted(batch_size=SAMPLES, epochs=4, seed=None)
    built = network()

    class Told:
        def __init__(self) -> None:
            self.events: list[Any] = []

        def start(self, what: str, *, total: int | None = None, unit: str = "samples") -> None:
            self.events.append((what, total, unit))

        def advance(self, amount: int, *, fields: Any = None) -> None:
            self.events.append((amount, fields))

        def finish(self) -> None:
            self.events.append("finish")

    path, board = tmp_path / "run.jsonl", tmp_path / "board"
    progress = Told()
    with Records(path, tensorboard=board) as records:
        comm.barrier()
        assert not path.exists()
        assert not board.exists()
        model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
        trainer = Trainer(model, optimizer=SGD, loss=nn.MSELoss(), records=records, record_every=2, progress=progress)
        trainer.fit(inputs(), batch_size=SAMPLES, epochs=4)
    if comm.rank == 0:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [(line["event"], line["iteration"]) for line in lines] == [
            ("processes", 0),
            ("tiling", 0),
            ("phases", 2),
            ("train", 2),
            ("phases", 4),
            ("train", 4),
            ("end", 4),
        ]
        assert len(list(board.iterdir())) == 1
        num_lines = len(lines)
        assert lines.pop()["stopped"] == "epochs"
        assert {each.partition(" on ")[0] for each in lines.pop(0)["ranks"].values()} >= {str(os.getpid())}
        assert lines[0]["tiling"] == model.tiling.to_dict()
        assert all(set(line["ranks"]) == set(model.names) and line["iterations"] == 2 for line in lines[1::2])
        trained = lines[2::2]
        assert [line["epoch"] for line in trained] == [1, 3]
        assert [line["loss"] for line in trained] == pytest.approx([losses[1], losses[3]])
        assert progress.events[0] == ("training", 4 * SAMPLES, "samples")
        assert progress.events[1] == (SAMPLES, {"loss": f"{losses[0]:.4g}"})
        assert progress.events[5:] == ["finish"]
        with pytest.raises(OutputExistsError, match=r"run\.jsonl exists already"), Records(path) as again:
            again.write("end", iteration=1, values={})
        Records(path, force=True).close()
        with Records(tmp_path / "new.jsonl", force=comm.size > 1) as late:
            assert not (tmp_path / "new.jsonl").exists()
            (tmp_path / "new.jsonl").write_text("other\n", encoding="utf-8")
            with pytest.raises(OutputExistsError, match=r"new\.jsonl exists") if comm.size == 1 else nullcontext():
                late.write("end", iteration=1, values={})
        text = (tmp_path / "new.jsonl").read_text(encoding="utf-8")
        assert text == ("other\n" if comm.size == 1 else '{"event": "end", "iteration": 1}\n')
        with Records(tmp_path / "late.jsonl") as late:  # where another rank was the first one before
            (tmp_path / "late.jsonl").write_text(text, encoding="utf-8")
            late.resume(iteration=1)
            late.write("end", iteration=2, values={})
        assert (tmp_path / "late.jsonl").read_text(encoding="utf-8") == '{"event": "end", "iteration": 2}\n'
        assert len(path.read_text(encoding="utf-8").splitlines()) == num_lines  # until there is a first record
        with pytest.raises(InputError, match="/dev/full is a device"):
            Records(Path("/dev/full"), force=True)
        with pytest.raises(InputError, match=r"run\.jsonl is a file, but a folder is needed"):
            Records(tensorboard=path, force=True)
    else:
        assert progress.events == []


@pytest.mark.parametrize("force", [False, True])
def test_a_rank_that_becomes_the_first_goes_on_in_the_records_of_the_one_before(tmp_path: Path, force: bool) -> None:
    """Whatever it records first; and a rank that is not let in leaves them as they are."""
    path, first = tmp_path / "run.jsonl", '{"event": "train", "iteration": 2}\n'
    path.write_text(first + '{"event": "train", "iteration": 3}\n')
    model: Any = SimpleNamespace(comm=SimpleNamespace(rank=0))
    with Records(path, force=force) as records:
        recorder = RunRecorder(model, records, every=1, whole=lambda body: body())
        recorder.failed(InputError("not let in"), iteration=0)
        assert len(path.read_text().splitlines()) == 2
        recorder.joins(is_wanted=True)
        recorder.write("validation", iteration=2, values={"loss": 0.5})
        recorder.ended("epochs", iteration=2)
    added = '{"event": "validation", "iteration": 2, "loss": 0.5}\n{"event": "end", "iteration": 2, "stopped": "epochs"}\n'
    assert path.read_text() == first + added


def test_a_rank_that_becomes_the_first_without_records_says_once_that_they_end() -> None:
    model: Any = SimpleNamespace(comm=SimpleNamespace(rank=0))
    recorder = RunRecorder(model, Records(), every=1, whole=lambda body: body())
    recorder.joins(is_wanted=True)
    with pytest.warns(UserWarning, match=r"the records of this run end here: .* Give Records\(\.\.\.\) on every rank"):
        recorder.write("validation", iteration=2, values={"loss": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.ended("epochs", iteration=2)


def test_a_full_disk_ends_the_records_and_not_the_run(tmp_path: Path) -> None:
    losses, _ = fitted(batch_size=8, epochs=2, seed=0)
    path, limits = tmp_path / "run.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    ended: list[Any] = []

    class Full(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if trainer.iteration == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))

        def on_exception(self, *given: Any) -> None:
            ended.append(given[-1])

    with Records(path) as records:
        model = tiled(network(), single_communicator(), layout=some_layouts(1)[-1], batch_size=8)
        trainer = Trainer(model, optimizer=SGD, loss=nn.MSELoss(), records=records, record_every=1, callbacks=[Full()])
        try:
            with pytest.warns(UserWarning, match=r"run\.jsonl cannot be written \(File too large\): the run goes on"):
                history = trainer.fit(inputs(), batch_size=8, epochs=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert history.losses == pytest.approx(losses)
    assert not ended
    last = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][-1]
    assert (last["event"], last["iteration"]) == ("train", 2)
