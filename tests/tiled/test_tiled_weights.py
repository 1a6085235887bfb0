"""Weights in files: whole, ordinary, for any tiling; and the last good ones where a loss stops being finite."""

import errno
import gc
import os
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import in_batches, plain_fit
from safetensors.torch import load_file, save_file
from torch import nn

import tatami
from drawing import one_at_a_time
from tatami.checkpoints import tensors
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import CheckpointError, CommTimeoutError, ModelError, NotFiniteError, OutputExistsError
from tatami.retiling import Controller, Decision, DecisionKind, Retiler
from tatami.testing.worlds import World
from tatami.train import Trainer, check_weights, load_model, load_whole_state_dict, save_model, whole_state_dict
from tiled_rig import assert_close, optimizers, simple_layout, some_layouts, tiled

SAMPLES = 12
ADAM = optimizers(torch.float64)["adam"]


class Network(nn.Module):
    """Two pairs of different units, a tied weight, a buffer and a frozen layer."""

    counts: torch.Tensor

    @one_at_a_time
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5, bias=False))
        self.two = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 5))
        self.last = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.last.weight
        self.two[0].requires_grad_(False)
        self.register_buffer("counts", torch.arange(3) + seed)
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.tied(self.last(self.two(self.one(x))))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


def test_tiled_to_plain_to_any_other_tiling(world: World, folder: Path) -> None:
    built, other = Network(0), Network(1)
    assert not torch.equal(built.last.weight, other.last.weight)

    def body(comm: AbstractCommunicator) -> None:
        place: Path = comm.bcast_object(folder)
        for index, layout in enumerate(some_layouts(comm.size)):
            path = place / "deep" / f"{index}.safetensors"
            model = tiled(built, comm, layout=layout, batch_size=SAMPLES)
            save_model(model, path)
            saved = load_file(path)
            assert saved.keys() == built.state_dict().keys()
            assert all(torch.equal(saved[name], value) for name, value in built.state_dict().items())
            plain = Network(2)
            plain.load_state_dict(saved)
            again = tiled(other, comm, layout=some_layouts(comm.size)[index - 1], batch_size=SAMPLES)
            load_model(again, path)
            whole = comm.bcast_object(whole_state_dict(again))
            assert all(torch.equal(whole[name], value) for name, value in built.state_dict().items())
            assert sorted(entry.name for entry in path.parent.iterdir()) == [f"{i}.safetensors" for i in range(index + 1)]
            comm.barrier()
            save_model(again, path, force=True)
            assert whole_state_dict(model).keys() == (saved.keys() if comm.rank == 0 else set())
            assert model.tile is not None or all(rows.tensor.numel() == 0 for block in model.block_rows() for rows in block)

    world(body)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("one.0.weight", torch.int8),
        ("one.0.weight", torch.bool),
        ("last.weight", torch.complex64),
        ("two.2.bias", torch.int64),
        ("counts", torch.float64),
        ("counts", torch.int32),
    ],
)
def test_weights_of_a_dtype_that_would_become_other_numbers_are_refused_by_name(
    world: World, folder: Path, name: str, dtype: torch.dtype
) -> None:
    built = Network(0)
    state = {key: value.clone() for key, value in Network(1).state_dict().items()}
    wanted = state[name].dtype
    said = f"{name} is {dtype}, this network needs {wanted}"

    def body(comm: AbstractCommunicator) -> None:
        path = Path(comm.bcast_object(folder)) / "other.safetensors"
        if comm.rank == 0:
            save_file(state | {name: state[name].to(dtype)}, path)
        comm.barrier()
        model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
        with pytest.raises(CheckpointError, match=re.escape(said)):
            check_weights(Network(0), path)
        with pytest.raises(CheckpointError, match=re.escape(said)):
            load_model(model, path)
        whole = comm.bcast_object(whole_state_dict(model))
        assert all(torch.equal(whole[key], value) for key, value in built.state_dict().items()), "nothing has changed"

    world(body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_floating_point_numbers_become_each_other(world: World, folder: Path, dtype: torch.dtype) -> None:
    state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in Network(1).state_dict().items()}

    def body(comm: AbstractCommunicator) -> None:
        path = Path(comm.bcast_object(folder)) / "other.safetensors"
        if comm.rank == 0:
            save_file({name: value.clone() for name, value in state.items()}, path)
        comm.barrier()
        model = tiled(Network(0), comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
        load_model(model, path)
        whole = comm.bcast_object(whole_state_dict(model))
        assert all(torch.equal(whole[name], value.to(whole[name].dtype)) for name, value in state.items())

    world(body)


@pytest.mark.parametrize("kind", ["file", "device", "folder", "no permission"])
def test_weights_are_never_nowhere(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Beside the file that is kept, or in this folder: what was trained is somewhere, and the error says where."""
    built = Network(0)

    def body(comm: AbstractCommunicator) -> None:
        place: Path = comm.bcast_object(folder)
        (place / "here").mkdir(exist_ok=True)
        if comm.size == 1 or comm.rank == 0:
            os.chdir(place / "here")
        path, error, said, found = {
            "file": (place / "w.safetensors", OutputExistsError, "exists already", place / "w-1.safetensors"),
            "device": (Path("/dev/full"), CheckpointError, "is a device", place / "here" / "full.safetensors"),
            "folder": (place / "here", CheckpointError, "is a directory", place / "here" / "here.safetensors"),
            "no permission": (Path("/proc/w.safetensors"), CheckpointError, "/proc", place / "here" / "w.safetensors"),
        }[kind]
        if comm.rank == 0 and kind == "file":
            path.write_bytes(b"mine")
        comm.barrier()
        model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
        with pytest.raises(error, match=said) as caught:
            save_model(model, path, force=kind != "file")
        assert str(caught.value).endswith(f"What was to be saved is in {found}")
        assert not isinstance(caught.value, OutputExistsError) or path.read_bytes() == b"mine"
        saved = load_file(found)
        assert all(torch.equal(saved[name], value) for name, value in built.state_dict().items())

    monkeypatch.chdir(Path())  # and back at the end
    world(body)


def test_where_nothing_can_be_written_all_ranks_hear_of_it(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Network(0)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def body(comm: AbstractCommunicator) -> None:
        place: Path = comm.bcast_object(folder)
        model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
        with pytest.raises(OSError, match=r"nothing could be saved, neither there nor .* No space left on device"):
            save_model(model, place / "w.safetensors")

    monkeypatch.setattr(tensors, "write_tensors", full)
    world(body)


def test_rank_0_has_the_whole_network_as_a_plain_one(world: World) -> None:
    built = Network(0)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def body(comm: AbstractCommunicator) -> None:
        for layout in some_layouts(comm.size):
            network = tiled(built, comm, layout=layout, batch_size=SAMPLES).whole()
            assert (network is None) == (comm.rank > 0)
            if network is not None:
                assert type(network) is Network
                assert torch.equal(network(x), built(x))
                assert network.tied.weight is network.last.weight

    world(body)


def test_a_network_that_is_gone_cannot_be_copied() -> None:
    model = tiled(nn.Sequential(nn.Linear(4, 2)), tatami.init(), layout=simple_layout([0]), batch_size=SAMPLES)
    gc.collect()
    with pytest.raises(ModelError, match="the network that was tiled is gone: keep a reference to it"):
        model.whole()


def test_evaluation_on_one_rank_names_the_ranks_that_are_missing_and_the_way() -> None:
    told = threading.Event()

    def body(comm: AbstractCommunicator) -> None:
        model = tiled(Network(0), comm, layout=simple_layout([0], [1, 2]), batch_size=SAMPLES)
        x = torch.zeros(SAMPLES, 4, dtype=torch.float64)
        trainer = Trainer(model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=F.mse_loss)
        if comm.rank == 1:
            with torch.no_grad(), pytest.raises(CommTimeoutError) as caught:
                model(torch.zeros(2, 4, dtype=torch.float64))
            assert "of which ranks 1, 2 hold one replica together: all of them must call it" in caught.value.__notes__[0]
            assert "network = model.whole()" in caught.value.__notes__[0]
            with pytest.raises(CommTimeoutError) as caught:
                trainer.evaluate((x, x[:, :2]), batch_size=SAMPLES)
            assert "Trainer.evaluate must be called by all ranks: is it inside of `if" in caught.value.__notes__[-1]
            told.set()
        assert told.wait(60)

    run_threads(body, size=3, timeout_s=3)


def test_weights_of_another_network_change_nothing(world: World, folder: Path) -> None:
    built = Network(0)
    wrong = built.state_dict() | {"one.0.weight": torch.zeros(9, 4), "surplus": torch.zeros(2)}
    del wrong["two.2.bias"]
    files = {
        "wrong": "one.0.weight has shape \\(9, 4\\), this network needs \\(7, 4\\)",
        "absent": "No such file",
        "damaged": "cannot be read as safetensors",
    }

    def body(comm: AbstractCommunicator) -> None:
        place: Path = comm.bcast_object(folder)
        if comm.rank == 0:
            save_file({name: value.clone() for name, value in wrong.items()}, place / "wrong")
            (place / "damaged").write_bytes(b"not a safetensors file at all")
        comm.barrier()
        model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
        for name, match in files.items():
            with pytest.raises(CheckpointError, match=match) as caught:
                load_model(model, place / name)
            assert str(place / name) in str(caught.value)
        with pytest.raises(CheckpointError) as caught:
            load_whole_state_dict(model, wrong if comm.rank == 0 else None)
        assert "two.2.bias is missing" in str(caught.value)
        assert "surplus (2,) is not known here" in str(caught.value)
        whole = comm.bcast_object(whole_state_dict(model))
        assert all(torch.equal(whole[name], value) for name, value in built.state_dict().items())

    world(body)


def poisoned() -> tuple[torch.Tensor, torch.Tensor]:
    """Three batches of four; the second sample of the third is NaN."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    y = torch.rand(SAMPLES, 5, generator=generator, dtype=torch.float64)
    x[9] = float("nan")
    return x, y


def plain_after(steps: int) -> dict[str, torch.Tensor]:
    x, y = poisoned()
    batches = in_batches(4, x, y)[:steps]
    return plain_fit(Network(0), batches, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), optimizer=ADAM)[1]


@pytest.mark.parametrize("retiled_after", [None, 1, 2])
def test_the_last_good_state_is_saved_before_the_error(
    world: World, folder: Path, retiled_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of iteration 2 was finite, so the parameters that it was computed with, those after iteration 1, are good."""
    built = Network(0)
    expected = plain_after(1)

    def body(comm: AbstractCommunicator) -> None:
        place: Path = comm.bcast_object(folder)
        layouts = some_layouts(comm.size)
        model = tiled(built, comm, layout=layouts[-1], batch_size=4)
        trainer = Trainer(
            model, optimizer=ADAM, loss=nn.MSELoss(), rescue_dir=place, retile=Retiler(every=1) if retiled_after else None
        )
        with pytest.raises(NotFiniteError) as caught:
            trainer.fit(poisoned(), batch_size=4, epochs=2, shuffle=False)
        tiling = model.layout.cut(samples=4, units=7)
        holder = next(tile for tile in tiling.tiles if tile.samples.start <= 1 < tile.samples.stop)
        replica = [int(tile.processor[1:]) for tile in tiling.replicas[holder.replica]]
        assert (caught.value.rank, caught.value.iteration) == (min(replica), 3)
        path = place / "last-good-000001.safetensors"
        assert f"the loss is nan on rank {min(replica)} of {comm.size}" in str(caught.value)
        assert f"after iteration 1, is in {path} and in the model" in str(caught.value)
        assert_close(load_file(path), expected, what="saved")
        assert_close(comm.bcast_object(whole_state_dict(model)), expected, what="in the model")

    if retiled_after:
        monkeypatch.setattr(Controller, "observe", partial(_retile_once, retiled_after, simple_layout(list(range(world.size)))))
    world(body)


def _retile_once(after: int, layout: Any, iteration: int, timings: Any) -> Decision:
    """A controller that lays the tiles anew after one iteration."""
    return Decision(
        kind=DecisionKind.WHOLE if iteration == after else DecisionKind.KEEP,
        iteration=iteration,
        layout=layout,
        speeds={},
        ratio=None,
        predicted=1.0,
        reason=f"the test says so ({len(list(timings))} timings)",
    )


def test_a_loss_that_is_bad_from_the_start_says_that_nothing_could_be_saved(world: World, folder: Path) -> None:
    built = Network(0)

    def body(comm: AbstractCommunicator) -> None:
        place: Path = comm.bcast_object(folder)
        x, y = poisoned()
        trainer = Trainer(
            tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES),
            optimizer=ADAM,
            loss=nn.MSELoss(),
            rescue_dir=place,
        )
        with pytest.raises(NotFiniteError, match=r"in iteration 1; there was no good state yet to save.*gradient_clip_val"):
            trainer.fit((x, y), batch_size=SAMPLES, epochs=1)
        assert list(place.iterdir()) == []

    world(body)


def test_what_an_earlier_run_rescued_is_not_written_over(world: World, folder: Path) -> None:
    built = Network(0)

    def body(comm: AbstractCommunicator) -> None:
        place: Path = comm.bcast_object(folder)
        earlier = place / "last-good-000001.safetensors"
        if comm.rank == 0:
            earlier.write_bytes(b"of an earlier run")
        comm.barrier()
        model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=4)
        trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), rescue_dir=place)
        with pytest.raises(NotFiniteError, match=r"is in \S*last-good-000001-1\.safetensors and in the model"):
            trainer.fit(poisoned(), batch_size=4, epochs=2, shuffle=False)
        assert earlier.read_bytes() == b"of an earlier run"
        assert_close(load_file(place / "last-good-000001-1.safetensors"), plain_after_1, what="saved")

    plain_after_1 = plain_after(1)
    world(body)
