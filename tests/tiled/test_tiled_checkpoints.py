"""A run that goes on from a checkpoint, in mid-epoch, has the numbers of the run that was not interrupted."""

import copy
import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import with_shards
from networks import GPT
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset, WeightedRandomSampler

import tatami
from drawing import Written, one_at_a_time
from tatami import outputs
from tatami.checkpoints import files as checkpoint_files
from tatami.checkpoints.tensors import read_tensors
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import CheckpointError, InputError, OutputExistsError
from tatami.parallel import ResumableLoader, SynchronizedSampler
from tatami.records import Records
from tatami.state.training_state import share_out
from tatami.tiling import Layout
from tatami.train import Callback, History, LRSchedulerConfig, ModelCheckpoint, Trainer, WeightAverage, tile, whole_state_dict
from tatami.train.checkpointing import TrainingCheckpoints
from tiled_rig import assert_close, simple_layout, some_layouts, tiled

pytestmark = pytest.mark.ranks(1, 2)

SAMPLES, BATCH = 22, 8
ADAM = partial(torch.optim.Adam, lr=0.02, eps=1e-6)
"""With the usual eps, the bias of keys, whose gradient cancels to rounding noise, would make steps of 1e-10 out of that."""


@one_at_a_time
def network() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3), nn.BatchNorm1d(3)]
    return nn.Sequential(*first, nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()


NETWORK = network()
SMALL = one_at_a_time(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double())()
"""Built once, both: ranks that are threads share torch's random state."""
DECAY = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return x, torch.rand(SAMPLES, 2, generator=generator, dtype=torch.float64)


class Noted(Callback):
    """Has state of its own."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: Any, values: Mapping[str, float]) -> None:  # noqa: ARG002
        self.values.append(values["train_loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def source(kind: str, comm: AbstractCommunicator) -> tuple[Any, dict[str, Any]]:
    data = TensorDataset(*inputs())
    if kind == "tensors":
        return inputs(), {"batch_size": BATCH}
    if kind == "loader":
        return DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)), {}
    generator = torch.Generator().manual_seed(3)
    if kind == "weighted":
        sampler = WeightedRandomSampler(range(1, SAMPLES + 1), SAMPLES, generator=generator)
        return DataLoader(data, batch_size=BATCH, sampler=sampler), {}
    if kind == "drawn in batches":
        return DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data, generator=generator), BATCH, drop_last=False)
        ), {}
    alone = comm.split(comm.rank)  # each rank goes through all samples
    assert alone is not None
    return ResumableLoader(DataLoader(data, batch_size=BATCH, sampler=SynchronizedSampler(data, alone))), {}


def trainer_of(
    comm: AbstractCommunicator, folder: Path | None, layout: Layout, *callbacks: Callback, records: Records | None = None
) -> Trainer:
    model = tiled(NETWORK, comm, layout=layout, batch_size=BATCH)
    model.generator.manual_seed(5)
    return Trainer(
        model,
        optimizer=ADAM,
        loss=nn.MSELoss(),
        scheduler=LRSchedulerConfig(scheduler=DECAY, interval="step"),
        callbacks=callbacks,
        records=records,
        record_every=1,
        checkpoint=ModelCheckpoint(dirpath=folder, every_n_train_steps=2) if folder is not None else None,
        seed=4,
    )


def run(
    comm: AbstractCommunicator, folder: Path | None, layout: Layout, *, kind: str = "tensors", **options: Any
) -> tuple[History, dict[str, torch.Tensor], Trainer, list[float]]:
    """Train; returns the whole weights on every rank, too, and what a callback noted."""
    noted = Noted()
    trainer = trainer_of(comm, folder, layout, noted)
    data, given = source(kind, comm)
    history = trainer.fit(data, epochs=3, **{**given, **options})
    return history, comm.bcast_object(whole_state_dict(trainer.model)), trainer, noted.values


class Averaging(Callback):
    """Keeps a moving average, which needs the tiled model."""

    def on_fit_start(self, trainer: Any) -> None:
        self.average = WeightAverage(trainer.model.parameters(), decay=0.7)

    def on_train_batch_end(self, trainer: Any, loss: float) -> None:  # noqa: ARG002
        self.average.step()


class LostPowerError(Exception):
    """The run ends in the middle."""


class LosesPower(Callback):
    """On all ranks, after an update that is not in a checkpoint."""

    def on_train_batch_end(self, trainer: Any, loss: float) -> None:  # noqa: ARG002
        if trainer.iteration == 5:
            raise LostPowerError


@pytest.mark.parametrize("kind", ["tensors", "loader", "resumable", "weighted", "drawn in batches"])
@pytest.mark.ranks(1, 2, 3)
def test_the_numbers_of_the_run_that_was_not_interrupted(comm: AbstractCommunicator, tmp_path: Path, kind: str) -> None:
    """Three batches in an epoch; saved after 2 of them (in mid-epoch), 4 (in mid-epoch) and 6 (at its end)."""
    for index, layout in enumerate(some_layouts(comm.size)[-2:]):
        straight, expected, _, noted = run(comm, None, layout, kind=kind)
        for iterations in (2, 3, 5):
            where = tmp_path / f"{index}-{iterations}"
            first, _, _, _ = run(comm, where, layout, kind=kind, iterations=iterations)
            rest, weights, trainer, again = run(comm, where, layout, kind=kind, resume=True)
            assert first.losses + rest.losses == straight.losses, f"{iterations} on {layout}"
            assert (trainer.iteration, trainer.epoch, rest.stopped) == (9, 3, "epochs")
            assert again == noted
            for name, value in expected.items():
                assert torch.equal(weights[name], value), name


class Draws(Callback):
    """Draws when an epoch begins and after every update, and asks for an end after one of them."""

    def __init__(self, generator: torch.Generator, stop_at: int | None) -> None:
        self.generator, self.stop_at, self.drawn = generator, stop_at, list[float]()

    def on_train_epoch_start(self, trainer: Any) -> None:  # noqa: ARG002
        torch.rand(1, generator=self.generator)

    def on_train_batch_end(self, trainer: Any, loss: float) -> None:  # noqa: ARG002
        self.drawn.append(torch.rand(1, generator=self.generator).item())
        trainer.should_stop = trainer.iteration == self.stop_at


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws for every sample."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, (self.x, self.y) = generator, inputs()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + torch.randn(4, generator=self.generator, dtype=torch.float64), self.y[index]


class WithoutLength:
    """Batches that are not counted before they have ended."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def check_draws(comm: AbstractCommunicator, folder: Path, kind: str, *, own: torch.Generator | None) -> None:
    """Data and a callback draw from the DataLoader's own generator or from torch's, in turn; three batches in an epoch."""
    generator = own or torch.default_generator
    alone = comm.split(comm.rank)
    assert alone is not None

    def fit(place: str, *, stop_at: int | None = None, **options: Any) -> tuple[list[float], list[float], Any]:
        generator.manual_seed(8 if options.get("resume") else 7)
        noisy, draws = Noisy(generator), Draws(generator, stop_at)
        data: Any = DataLoader(noisy, batch_size=BATCH, shuffle=True, generator=own)
        if kind == "resumable":
            sampler = SynchronizedSampler(noisy, alone)
            data = ResumableLoader(DataLoader(noisy, batch_size=BATCH, sampler=sampler, generator=own))
        elif kind == "without length":
            data = WithoutLength(data)
        elif kind == "samples":
            data, options["batch_size"] = noisy, BATCH
        trainer = trainer_of(comm, folder / place, some_layouts(comm.size)[-1], draws)
        losses = trainer.fit(data, **{"epochs": 3, **options}).losses
        return losses, draws.drawn, comm.bcast_object(whole_state_dict(trainer.model))

    losses, drawn, weights = fit("straight")
    ends: list[dict[str, Any]] = [{"stop_at": 4}, {"epochs": 1}]  # the others hear of it with the update after it
    if kind != "without length":
        ends += [{"iterations": 2}, {"iterations": 3}]
    for number, end in enumerate(ends):
        first = fit(str(number), **end)
        rest = fit(str(number), resume=True)
        assert first[0] + rest[0] == losses, end
        assert first[1] + rest[1] == drawn, end
        assert all(torch.equal(rest[2][name], value) for name, value in weights.items())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["samples", "loader", "resumable", "without length"])
def test_what_is_drawn_from_torch_is_what_would_have_been_drawn(comm: AbstractCommunicator, tmp_path: Path, kind: str) -> None:
    check_draws(comm, tmp_path, kind, own=None)


@pytest.mark.parametrize("kind", ["loader", "resumable"])
def test_what_is_drawn_from_the_loaders_generator_is_what_would_have_been_drawn(
    comm: AbstractCommunicator, tmp_path: Path, kind: str
) -> None:
    check_draws(comm, tmp_path, kind, own=torch.Generator())


def test_a_resumed_run_is_recorded_behind_what_it_has_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def fit(saved: str, *, force: bool = False, **options: Any) -> list[tuple[str, int]]:
        with Records(path, force=force, settings={"net": "small"}) as records:
            trainer = trainer_of(tatami.init(), tmp_path / saved, simple_layout([0]), records=records)
            trainer.fit(inputs(), batch_size=BATCH, **options)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(line["event"], line.get("iteration", 0)) for line in lines if line["event"] in ("settings", "train", "end")]

    first = fit("saved", iterations=5)
    assert first == [("settings", 0), *(("train", number) for number in range(1, 6)), ("end", 5)]
    assert fit("saved", iterations=7, resume=True) == [*first[:-1], ("train", 6), ("train", 7), ("end", 7)]
    text = path.read_text(encoding="utf-8")
    for saved, options in (("other", {"resume": True}), ("another", {"resume": tmp_path / "saved"}), ("third", {})):
        with pytest.raises(OutputExistsError, match=r"run\.jsonl exists already"):  # of another run than this one
            fit(saved, iterations=1, **options)
        assert path.read_text(encoding="utf-8") == text
    assert fit("other", force=True, iterations=1) == [("settings", 0), ("train", 1), ("end", 1)]


@pytest.mark.ranks(2)
def test_after_an_interrupted_update_the_last_checkpoint_counts(comm: AbstractCommunicator, tmp_path: Path) -> None:
    layout = some_layouts(comm.size)[0]
    straight, expected, _, _ = run(comm, None, layout)
    trainer = trainer_of(comm, tmp_path, layout, Noted(), LosesPower())
    with pytest.raises(LostPowerError):
        trainer.fit(inputs(), batch_size=BATCH, epochs=3)
    rest, weights, again, _ = run(comm, tmp_path, layout, resume=True)
    # That of update 4 is a checkpoint only if all ranks knew in time that it was written.
    assert len(rest.losses) in (5, 7)
    assert rest.losses == straight.losses[-len(rest.losses) :]
    assert_close(weights, expected, what="weights")
    assert again.iteration == 9


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 4), (4, 2), (3, 3)])
def test_any_number_of_ranks_on_any_tiling_goes_on(folder: Path, sizes: tuple[int, int]) -> None:
    """A GPT: attention with packed projections, tied weights; its shards are about as large as each other."""
    text = torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(0))

    def cross_entropy(output: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction=reduction)

    torch.manual_seed(3)
    built = GPT(layers=1).double()

    def body(comm: AbstractCommunicator, layout: int, place: Path | None, **options: Any) -> Any:
        layouts = list(with_shards(some_layouts(comm.size)))
        chosen, shards = layouts[layout % len(layouts)]
        given = {"speeds": "equal", **shards}
        model = tile(built, comm, batch_size=4, sample=text[:2], layout=chosen, quiet=True, **given)
        checkpoint = ModelCheckpoint(dirpath=place) if place is not None else None
        averaging, given = Averaging(), {"reduction": "mean", "checkpoint": checkpoint, "seed": 1}
        trainer = Trainer(model, optimizer=ADAM, loss=cross_entropy, callbacks=[averaging], **given)
        history = trainer.fit((text, text.roll(-1, 1)), batch_size=4, epochs=2, **options)
        weights = comm.bcast_object(whole_state_dict(model))
        with averaging.average.applied():
            averages = comm.bcast_object(whole_state_dict(model))
        return history.losses, weights | {f"average of {name}": value for name, value in averages.items()}

    first, second = sizes
    expected, weights = run_threads(partial(body, layout=0, place=None), size=1)[0]
    for number in range(3):
        place = folder / str(number)
        begun = run_threads(partial(body, layout=number + 1, place=place, iterations=2), size=first)
        shards = [path.stat().st_size for path in place.glob("step-00000002/*.safetensors")]
        assert len(shards) == first
        rest = run_threads(partial(body, layout=number, place=place, resume=True), size=second)
        for losses, found in rest:
            assert begun[0][0] + losses == pytest.approx(expected, rel=1e-10)
            assert_close(found, weights, what=f"weights of {sizes}")


def test_what_replicas_draw_for_themselves_goes_on(comm: AbstractCommunicator, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    # A tiled run cannot draw by a function as one machine does.
    built = Written(lambda own, x: own.net(F.dropout(x, 0.5, own.training)), net=net).double()
    layout = some_layouts(comm.size)[-1]

    def losses(where: Path, **options: Any) -> list[float]:
        """Each run has a seed of its own, so that those that go on must take it from the checkpoint."""
        model = tile(built, comm, batch_size=BATCH, speeds="equal", layout=layout, random="local", quiet=True)
        assert model.draws is not None
        if not options.get("resume"):
            model.draws.load_state_dict({"seed": 7, "num_passes": 0})
            torch.manual_seed(7)  # of one rank alone, which draws as the plain model does
        trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), checkpoint=ModelCheckpoint(dirpath=where))
        return trainer.fit(inputs(), batch_size=BATCH, epochs=2, **options).losses

    straight = losses(tmp_path / "straight")
    assert losses(tmp_path / "parts", iterations=4) + losses(tmp_path / "parts", resume=True) == straight


def test_two_are_kept_and_what_ends_fit_is_saved(comm: AbstractCommunicator, tmp_path: Path) -> None:
    run(comm, tmp_path, some_layouts(comm.size)[0], iterations=5)
    comm.barrier()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    _, _, trainer, _ = run(comm, tmp_path, some_layouts(comm.size)[0], resume=True)
    history = trainer.fit(inputs(), batch_size=BATCH, epochs=3, resume=True)
    assert (history.losses, history.stopped, trainer.iteration) == ([], "epochs", 9)


def test_where_it_goes_on_is_told_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(comm: AbstractCommunicator, **limits: Any) -> None:
        run(comm, folder, some_layouts(comm.size)[0], resume=True, **limits)

    for iterations in (3, 5):
        run_threads(partial(body, iterations=iterations), size=2)
    run_threads(body, size=2)
    assert [line for line in capsys.readouterr().out.splitlines() if "checkpoint" in line] == [
        f"tatami: there is no checkpoint in {folder} yet; training begins",
        f"tatami: going on from the checkpoint in {folder}, after 3 updates: 0 epochs and 3 batches of the next",
        f"tatami: going on from the checkpoint in {folder}, after 5 updates: 1 epoch and 2 batches of the next",
    ]
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*nothing"):
        run_threads(lambda comm: run(comm, folder, some_layouts(comm.size)[0], resume=folder / "nothing"), size=1)
    assert "training begins" not in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["truncated", "missing"])
def test_a_damaged_newest_checkpoint_is_left_out_with_a_warning_and_the_loss_is_that_of_an_unbroken_run(
    folder: Path, harm: str
) -> None:
    straight = run_threads(lambda comm: run(comm, folder / "straight", some_layouts(2)[0])[0].losses, size=2)
    run_threads(lambda comm: run(comm, folder / "broken", some_layouts(2)[0], iterations=5), size=2)
    shard = folder / "broken" / "step-00000005" / "rank-0001.safetensors"
    if harm == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shard.unlink()
    with pytest.warns(UserWarning, match=f"step 4 is used, as newer ones are damaged:\n  step 5: {shard} is {harm}"):
        ended = run_threads(lambda comm: run(comm, folder / "broken", some_layouts(2)[0], resume=True)[0].losses, size=2)
    assert ended == [losses[4:] for losses in straight]


@pytest.mark.parametrize(("full_at", "survives"), [(2, True), (2, False), (4, True), (5, True)])
def test_a_run_that_survives_a_full_disk_goes_on_without_that_checkpoint_but_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, full_at: int, survives: bool
) -> None:
    write = outputs.write_bytes

    def write_bytes(path: Path, data: bytes, *, force: bool) -> None:
        if path == folder / f"step-{full_at:08d}" / "rank-0001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data, force=force)

    def body(comm: AbstractCommunicator) -> None:
        trainer = trainer_of(comm, folder, some_layouts(2)[0])
        trainer.fit(inputs(), batch_size=BATCH, epochs=3, iterations=iterations)

    iterations = max(full_at, 4) if survives and full_at > 2 else 5
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(checkpoint_files, "write_bytes", write_bytes)
    monkeypatch.setattr(TrainingCheckpoints, "survives", survives)  # as in elastic runs
    problem = f"step {full_at} could not be written.*No space left on device"
    if survives and full_at == 2:
        with pytest.warns(UserWarning, match=f"{problem}.*the run goes on without this checkpoint"):
            run_threads(body, size=2)
        assert sorted(each.name for each in folder.iterdir()) == ["step-00000004", "step-00000005"]
    elif survives:  # the weights are kept where there is room
        own = (
            pytest.warns(UserWarning, match=f"{problem}.*; the end of training is saved next")
            if full_at == 4
            else nullcontext()
        )
        saved = f"last-good-{full_at:06d}.safetensors"
        with own, pytest.raises(CheckpointError, match=f"{problem}; the weights after iteration {full_at} are in {saved}"):
            run_threads(body, size=2)
        expected = run_threads(lambda comm: run(comm, None, some_layouts(2)[0], iterations=iterations)[1], size=2)[0]
        assert_close(read_tensors(Path(saved)), expected, what="weights")
    else:
        with pytest.raises(CheckpointError, match=problem):
            run_threads(body, size=2)


def test_what_cannot_be_gone_on_with_is_refused_by_name(comm: AbstractCommunicator, tmp_path: Path) -> None:
    layout = some_layouts(comm.size)[0]
    run(comm, tmp_path, layout, iterations=2)

    def resumed(
        built: nn.Module,
        optimizer: Any = ADAM,
        batch_size: int = BATCH,
        where: Any = tmp_path,
        data: Any = None,
        shuffle: bool = True,
        accumulate: int = 1,
    ) -> None:
        model = tiled(built, comm, layout=layout, batch_size=BATCH)
        before = comm.bcast_object(whole_state_dict(model))
        trainer = Trainer(model, optimizer=optimizer, loss=nn.MSELoss(), seed=4, accumulate_grad_batches=accumulate)
        try:
            given: Any = {"batch_size": batch_size} if data is None else {}
            trainer.fit(data or inputs(), epochs=3, shuffle=shuffle, resume=where, **given)
        finally:
            after = comm.bcast_object(whole_state_dict(model))
            assert all(torch.equal(before[name], after[name]) for name in before)

    other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for arguments, match in (
        ({"built": other}, r"(?s)of another network:.*0.weight has shape \(8, 4\), this network needs \(5, 4\)"),
        ({"built": NETWORK, "optimizer": partial(torch.optim.SGD, lr=0.1)}, "this state is of Adam, and the optimizer is SGD"),
        ({"built": NETWORK, "batch_size": 9}, r"only go on as it began: batch_size is 9 \(was 8\)\. Give"),
        ({"built": NETWORK, "shuffle": False}, r"only go on as it began: shuffle is False \(was True\)\. Give"),
        ({"built": NETWORK, "accumulate": 2}, r"only go on as it began: accumulate_grad_batches is 2 \(was 1\)\. Give"),
        (
            {"built": NETWORK, "data": DataLoader(TensorDataset(*inputs()), batch_size=BATCH)},
            r": shuffle is up to the loader \(was True\)\. Give",
        ),
        ({"built": NETWORK, "where": tmp_path / "nothing"}, "there is no checkpoint in .*nothing"),
    ):
        with pytest.raises(CheckpointError, match=match):
            resumed(**arguments)
    with pytest.raises(InputError, match=r"resume=True: the Trainer has no checkpoint=ModelCheckpoint\(dirpath=...\)"):
        resumed(NETWORK, where=True)
    comm.barrier()
    if comm.rank == 0:
        shard = next(iter(tmp_path.glob("step-00000002/rank-0000.safetensors")))
        shard.write_bytes(shard.read_bytes()[:-1])
    comm.barrier()
    with pytest.raises(CheckpointError, match=r"rank-0000.safetensors is truncated"):
        resumed(NETWORK)


@pytest.mark.ranks(1)
def test_a_scheduler_that_is_no_longer_there_is_warned_about(comm: AbstractCommunicator, tmp_path: Path) -> None:
    layout = some_layouts(1)[0]
    run(comm, tmp_path, layout, iterations=2)
    model = tiled(NETWORK, comm, layout=layout, batch_size=BATCH)
    trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), seed=4)
    with pytest.warns(UserWarning, match="was written with a scheduler, and the run goes on without one"):
        trainer.fit(inputs(), batch_size=BATCH, epochs=3, resume=tmp_path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options", [{"stages": 2}, {"sharded_optimizer": True, "planner": "weighted"}], ids=["stages", "shards"]
)
def test_counters_are_those_of_the_ranks_that_update_a_weight(
    comm: AbstractCommunicator, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Adagrad has one for every weight from the beginning; where a rank does not update the weight, it stays 0."""
    (x, y), plain = inputs(), copy.deepcopy(SMALL)
    adagrad = partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1)
    expected = adagrad(plain.parameters())
    for resumes in (False, True):
        given = {"batch_size": SAMPLES, "reduction": "mean", "speeds": "equal", "quiet": True, **options}
        model = tile(copy.deepcopy(SMALL), comm, sample=x[:2], **given)
        optimizer = adagrad(model.parameters())
        if resumes:
            tatami.load_training(tmp_path, model, optimizer)
        for _ in range(3):
            for each, make in ((model, optimizer), (plain, expected)):
                make.zero_grad()
                here = each.local(x, y) if each is model else (x, y)
                F.mse_loss(each(here[0]), here[1]).backward()  # type: ignore[no-untyped-call]
                make.step()
        if not resumes:
            tatami.save_training(tmp_path, model, optimizer, step=3)
    found = comm.bcast_object(whole_state_dict(model))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


class Counts(Callback):
    """How many updates there were."""

    count = 0

    def on_train_batch_end(self, trainer: Any, loss: float) -> None:  # noqa: ARG002
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class AlsoCounts(Counts):
    pass


@pytest.mark.ranks(1, 2)
def test_states_go_to_what_is_of_their_kind(comm: AbstractCommunicator, tmp_path: Path) -> None:
    """Those of callbacks in another order, of a schedule, of a scaler that there was not, of weights of another dtype."""

    def fit(iterations: int, *callbacks: Callback, schedule: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        model = tile(copy.deepcopy(SMALL).to(dtype), comm, batch_size=BATCH, speeds="equal", quiet=True)
        given = {"loss": nn.MSELoss(), "callbacks": callbacks, "scheduler": schedule, **options}
        trainer = Trainer(model, optimizer=ADAM, checkpoint=ModelCheckpoint(dirpath=tmp_path), **given)
        x, y = inputs()
        trainer.fit((x.to(dtype), y.to(dtype)), batch_size=BATCH, iterations=iterations, resume=True)
        return trainer

    stepped = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    fit(2, Counts(), AlsoCounts(), schedule=stepped)
    other, one = AlsoCounts(), Counts()
    other.count = one.count = 100
    fit(3, other, one, schedule=stepped)
    assert (other.count, one.count) == (3, 3)
    with pytest.raises(CheckpointError, match="its learning rates are of StepLR, and this run's scheduler is ExponentialLR"):
        fit(4, Counts(), AlsoCounts(), schedule=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5))
    told = pytest.warns(UserWarning, match="states of callbacks that this run does not have: AlsoCounts")
    with told if comm.rank == 0 else nullcontext():
        fit(4, Counts(), schedule=stepped)
    trainer = fit(6, Counts(), schedule=stepped, dtype=torch.float32, precision="16-mixed")
    assert trainer.iteration == 6
    assert {each["exp_avg"].dtype for each in trainer.optimizer.state.values()} == {torch.float32}


def test_settings_that_cannot_be() -> None:
    for options, match in (
        ({"every_n_train_steps": 0}, "every_n_train_steps must be at least 1, not 0"),
        ({"every_n_epochs": -1}, "every_n_epochs must be at least 1, not -1"),
        ({"train_time_interval": 0}, "train_time_interval must be above 0, not 0"),
    ):
        with pytest.raises(InputError, match=match):
            ModelCheckpoint(dirpath="x", **options)


def test_pieces_are_written_by_one_of_their_owners_and_all_write_about_as_much() -> None:
    pieces = [(10, [0, 1]), (40, [0, 2]), (30, [1, 3]), (20, [2, 3]), (10, [0, 1, 2, 3]), (0, [3])]
    writers = share_out(pieces)
    assert all(writer in owners for writer, (_, owners) in zip(writers, pieces, strict=True))
    loads = [sum(size for writer, (size, _) in zip(writers, pieces, strict=True) if writer == rank) for rank in range(4)]
    # Largest first, each to the owner with least so far: 40 to rank 0, 30 to 1, 20 to 2, 10 of [0, 1] to 1, 10 of all to 3.
    assert loads == [40, 40, 20, 10]
