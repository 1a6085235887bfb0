"""Checkpoints of many ranks: whole or not at all, found again after any loss, and never silently another state."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tatami.checkpoints import MultiNodeCheckpoint
from tatami.checkpoints import files as checkpoint_files
from tatami.checkpoints.choice import parse_replica_sets
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import CheckpointError, InputError
from tatami.testing.worlds import World


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"weights": torch.full((3, 2), float(100 * step + rank)), "step": step, "rank": rank}


def opened(comm: AbstractCommunicator, folder: Path, *, own_disks: bool = False, **options: Any) -> MultiNodeCheckpoint:
    base = Path(comm.bcast_object(folder))
    return MultiNodeCheckpoint(base / f"disk-{comm.rank}" if own_disks else base, comm, **options)


def save_steps(size: int, folder: Path, *, steps: tuple[int, ...] = (10, 20, 30), **options: Any) -> None:
    def body(comm: AbstractCommunicator) -> None:
        checkpoint = opened(comm, folder, **{"keep": 5, **options})
        for step in steps:
            checkpoint.save(step, state_of(comm.rank, step))
        checkpoint.close()

    run_threads(body, size=size)


def resumed(size: int, folder: Path, *, reshard: Any = None, **options: Any) -> list[Any]:
    """(step, what each rank got) of each rank; or None."""

    def body(comm: AbstractCommunicator) -> Any:
        checkpoint = opened(comm, folder, **{"keep": 5, **options})
        found = checkpoint.resume(reshard=reshard)
        checkpoint.close()
        return None if found is None else (found.step, found.state)

    return run_threads(body, size=size)


def assert_resumes(found: list[Any], *, step: int) -> None:
    for rank, (at, state) in enumerate(found):
        assert (at, state["step"], state["rank"]) == (step, step, rank)
        assert torch.equal(state["weights"], torch.full((3, 2), float(100 * step + rank)))


def data_file(folder: Path, *, step: int, rank: int) -> Path:
    return checkpoint_files.step_folder(folder, step) / checkpoint_files.file_name(f"rank-{rank:04d}")


@pytest.mark.parametrize("own_disks", [False, True], ids=["shared", "own-disks"])
def test_each_rank_gets_its_own_state_back(comm: AbstractCommunicator, folder: Path, own_disks: bool) -> None:
    checkpoint = opened(comm, folder, own_disks=own_disks)
    assert checkpoint.resume() is None
    for step in (1, 2, 3):
        checkpoint.save(step, state_of(comm.rank, step))
    found = checkpoint.resume()
    assert found is not None
    assert (found.step, found.ranks, found.skipped) == (3, comm.size, ())
    assert found.state["rank"] == comm.rank
    assert torch.equal(found.state["weights"], state_of(comm.rank, 3)["weights"])
    comm.barrier()
    mine = Path(comm.bcast_object(folder)) / (f"disk-{comm.rank}" if own_disks else "")
    assert sorted(path.name for path in mine.glob("step-*")) == ["step-00000002", "step-00000003"]
    comm.barrier()
    checkpoint.close()


def test_a_run_goes_on_as_if_it_had_not_ended(world: World, folder: Path) -> None:
    """Model, optimizer with momentum, scheduler and generator, as torch's state dicts hold them."""

    def made(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), generator

    def train(parts: Any, *, steps: int) -> None:
        model, optimizer, scheduler, generator = parts
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            scheduler.step()

    def body(comm: AbstractCommunicator) -> None:
        whole = made(comm.rank)
        train(whole, steps=6)
        first, second = made(comm.rank), made(comm.rank + 50)
        train(first, steps=3)
        checkpoint = opened(comm, folder)
        model, optimizer, scheduler, generator = first
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        checkpoint.save(3, {**{name: each.state_dict() for name, each in states.items()}, "draws": generator.get_state()})
        found = checkpoint.resume()
        assert found is not None
        for name, each in zip(states, second, strict=False):
            each.load_state_dict(found.state[name])
        second[3].set_state(found.state["draws"])
        train(second, steps=3)
        torch.testing.assert_close(second[0].state_dict(), whole[0].state_dict(), rtol=0, atol=0)
        assert second[2].get_last_lr() == whole[2].get_last_lr()
        checkpoint.close()

    world(body)


def test_states_are_kept_exactly(folder: Path) -> None:
    tied = torch.arange(6.0).view(2, 3)
    state: dict[Any, Any] = {
        "tensors": [torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.bool)],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3),
        "tied": (tied, tied, tied.t(), tied[1:]),
        3: {"int key": -1, True: None, 2.5: "text \u7573", "infinite": float("inf"), "nothing": (), "list": []},
        "a.b": {"c": 1},
        "a": {"b.c": torch.ones(1), "b": {"c": torch.zeros(1)}},
    }
    checkpoint = MultiNodeCheckpoint(folder, single())
    checkpoint.save(0, state)
    found = checkpoint.resume()
    assert found is not None
    assert repr(found.state) == repr(state)
    assert [each.dtype for each in found.state["tensors"]] == [each.dtype for each in state["tensors"]]
    for path in folder.rglob("*.safetensors"):
        assert b"pickle" not in path.read_bytes()


def single() -> AbstractCommunicator:
    return run_threads(lambda comm: comm, size=1)[0]


# -- losses ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_disks", [False, True])
def test_the_newest_step_that_is_complete_on_all_ranks_is_resumed(folder: Path, own_disks: bool) -> None:
    save_steps(3, folder, own_disks=own_disks)
    disks = [folder / f"disk-{rank}" if own_disks else folder for rank in range(3)]
    data_file(disks[1], step=30, rank=1).unlink()
    gone = r"\n  step 30: .*step-00000030/rank-0001.safetensors is missing, and no rank has a copy"
    with pytest.warns(UserWarning, match=f"the checkpoint of step 20 is used, as newer ones are damaged:{gone}"):
        assert_resumes(resumed(3, folder, own_disks=own_disks), step=20)
    data_file(disks[2], step=20, rank=2).unlink()
    with pytest.warns(UserWarning, match=f"the checkpoint of step 10 is used, as newer ones are damaged:{gone}\n  step 20"):
        assert_resumes(resumed(3, folder, own_disks=own_disks), step=10)
    data_file(disks[0], step=10, rank=0).unlink()
    with pytest.raises(CheckpointError, match=f"is whole:{gone}\n  step 20.*\n  step 10"):
        resumed(3, folder, own_disks=own_disks)


def test_a_manifest_on_one_disk_is_enough(folder: Path) -> None:
    save_steps(3, folder, own_disks=True)
    for rank in (0, 2):
        (checkpoint_files.step_folder(folder / f"disk-{rank}", 30) / "manifest.json").unlink()
    assert_resumes(resumed(3, folder, own_disks=True), step=30)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_disk_is_made_up_for_by_the_copy_on_its_neighbours(folder: Path, lost: int) -> None:
    save_steps(3, folder, own_disks=True, copies=1)
    (folder / f"disk-{lost}").rename(folder / "gone")
    assert_resumes(resumed(3, folder, own_disks=True, copies=1), step=30)
    (folder / f"disk-{(lost + 1) % 3}").rename(folder / "gone too")
    with pytest.raises(CheckpointError, match=f"rank-000{lost}.safetensors is missing, and no rank has a copy"):
        resumed(3, folder, own_disks=True, copies=1)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("size", [10, 300_000])
def test_what_a_rank_has_lost_comes_from_the_others(comm: AbstractCommunicator, folder: Path, size: int) -> None:
    checkpoint = opened(comm, folder, own_disks=True, copies=1)
    state = torch.randn(size, generator=torch.Generator().manual_seed(comm.rank))
    checkpoint.save(7, state)
    if comm.rank == 1:
        shutil.rmtree(Path(comm.bcast_object(folder)) / "disk-1")
    else:
        comm.bcast_object(folder)
    found = checkpoint.resume()
    assert found is not None
    assert torch.equal(found.state, state)
    checkpoint.close()


def test_ranks_that_swapped_their_disks_get_their_own_state(folder: Path) -> None:
    save_steps(2, folder, own_disks=True)
    (folder / "disk-0").rename(folder / "other")
    (folder / "disk-1").rename(folder / "disk-0")
    (folder / "other").rename(folder / "disk-1")
    assert_resumes(resumed(2, folder, own_disks=True), step=30)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"rank-0001.safetensors is truncated: it should have (\d+) bytes, and has \d+"),
        (corrupt, r"rank-0001.safetensors is corrupt: its SHA-256 should be \w+..., and is \w+..."),
    ],
)
def test_a_damaged_file_is_named_and_the_one_before_used(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    save_steps(3, folder)
    damage(data_file(folder, step=30, rank=1))
    with pytest.warns(UserWarning, match=rf"step 20 is used, as newer ones are damaged:\n  step 30: .*step-00000030/{message}"):
        assert_resumes(resumed(3, folder), step=20)


@pytest.mark.parametrize("damage", [truncate, corrupt])
def test_a_damaged_file_is_made_up_for_by_its_copy(folder: Path, damage: Callable[[Path], None]) -> None:
    save_steps(3, folder, copies=1)
    damage(data_file(folder, step=30, rank=1))
    with pytest.warns(UserWarning, match=r"step-00000030/rank-0001.safetensors is .*; a copy is used"):
        assert_resumes(resumed(3, folder, copies=1), step=30)


@pytest.mark.parametrize("damage", [truncate, corrupt])
def test_a_damaged_manifest_is_named(folder: Path, damage: Callable[[Path], None]) -> None:
    save_steps(2, folder)
    path = checkpoint_files.step_folder(folder, 30) / "manifest.json"
    damage(path)
    with pytest.warns(UserWarning, match=r"step 20 is used, as newer ones are damaged:\n  step 30: .*manifest.json is damaged"):
        assert_resumes(resumed(2, folder), step=20)


def test_a_changed_manifest_and_one_of_another_format_are_told_apart(folder: Path) -> None:
    save_steps(1, folder, steps=(1,))
    path = checkpoint_files.step_folder(folder, 1) / "manifest.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "step": 2}))
    with pytest.raises(CheckpointError, match=r"its checksum should be \w+..., and is"):
        resumed(1, folder)
    del body["sha256"]
    body["format"] = 7
    path.write_text(json.dumps({**body, "sha256": checkpoint_files._checksum(body)}))
    with pytest.raises(CheckpointError, match="its format is 7, and this version of tatami reads 1"):
        resumed(1, folder)


def test_every_single_byte_that_may_be_cut_off_is_noticed(folder: Path) -> None:
    save_steps(1, folder, steps=(1, 2))
    path = data_file(folder, step=2, rank=0)
    whole = path.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.warns(UserWarning, match="rank-0000.safetensors is truncated"):
            assert_resumes(resumed(1, folder), step=1)


# -- another number of ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_that_all_ranks_share_is_loaded_by_any_number_of_them(folder: Path, ranks: int) -> None:
    save_steps(3, folder, replica_sets=[])
    assert [path.name for path in folder.glob("step-00000030/*.safetensors")] == ["rank-0000.safetensors"]
    found = resumed(ranks, folder, replica_sets=[])
    assert [(step, state["rank"]) for step, state in found] == [(30, 0)] * ranks


def test_state_of_each_rank_says_why_another_number_cannot_load_it(folder: Path) -> None:
    save_steps(3, folder)
    for ranks in (2, 4):
        with pytest.raises(CheckpointError, match=rf"saved by 3 ranks with 3 different states; this job has {ranks} ranks"):
            resumed(ranks, folder)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_can_be_made_anew_for_another_number(folder: Path, ranks: int) -> None:
    save_steps(3, folder)
    found = resumed(ranks, folder, reshard=lambda states: [state["rank"] for state in states])
    assert found == [(30, [0, 1, 2])] * ranks


def test_what_fails_in_making_it_anew_is_told_on_all_ranks(folder: Path) -> None:
    save_steps(2, folder)

    def fails(states: list[Any]) -> Any:
        return states[2]

    with pytest.raises(CheckpointError, match=r"could not be loaded on every rank: IndexError: .* range"):
        resumed(3, folder, reshard=fails)


def test_sets_may_have_other_numbers_of_replicas(folder: Path) -> None:
    save_steps(4, folder, replica_sets=[[0, 2], [1, 3]])
    assert [path.name[:9] for path in sorted(folder.glob("step-00000030/*.safetensors"))] == ["rank-0000", "rank-0001"]
    found = resumed(4, folder, replica_sets=[[0, 2], [1, 3]])
    assert [state["rank"] for _, state in found] == [0, 1, 0, 1]
    assert [state["rank"] for _, state in resumed(2, folder)] == [0, 1]
    assert [state["rank"] for _, state in resumed(3, folder, replica_sets=[[0, 1]])] == [0, 0, 1]


@pytest.mark.parametrize(
    ("sets", "ranks", "expected"),
    [
        (None, 3, ((0,), (1,), (2,))),
        ([[0]], 4, ((0,), (1, 2, 3))),
        ([[0, 1]], 4, ((0, 1), (2, 3))),
        ([[0, 1], [2, 3]], 4, ((0, 1), (2, 3))),
        ([], 4, ((0, 1, 2, 3),)),
        ([[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]], 16, (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))),
        ([[0, 2, 4, 6, 8, 10, 12, 14]], 16, (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))),
        ([], 8, (tuple(range(8)),)),
        ([[3, 2], [1]], 4, ((0,), (1,), (2, 3))),
        ([0], 4, ((0,), (1, 2, 3))),
        ([0, 1], 4, ((0,), (1,), (2, 3))),
        ([1, (3, 2)], 4, ((0,), (1,), (2, 3))),
    ],
)
def test_replica_sets(sets: Any, ranks: int, expected: Any) -> None:
    assert parse_replica_sets(sets, ranks=ranks) == expected


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[0, 4]], "no rank 4"),
        ([[0, 1], [1]], "rank 1 is named twice"),
        ([[]], "without ranks"),
        ([[-1]], "no rank -1"),
        ([5], "no rank 5"),
        ([1, 1], "rank 1 is named twice"),
    ],
)
def test_replica_sets_that_can_not_be(sets: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_replica_sets(sets, ranks=4)


# -- writing -----------------------------------------------------------------------------------------------------------------


def test_an_exception_keeps_every_checkpoint(folder: Path) -> None:
    def body(comm: AbstractCommunicator) -> None:
        checkpoint = opened(comm, folder, keep=5)
        for step in (1, 2, 3):
            checkpoint.save(step, state_of(comm.rank, step))
        comm.barrier()
        if comm.rank == 0:
            raise ZeroDivisionError("in training")
        comm.barrier()

    with pytest.raises(ZeroDivisionError):
        run_threads(body, size=2)
    assert len(list(folder.glob("step-*"))) == 3
    assert_resumes(resumed(2, folder), step=3)


def test_a_save_that_was_cut_short_does_not_count(folder: Path) -> None:
    save_steps(2, folder, steps=(10, 20))
    data_file(folder, step=30, rank=0).parent.mkdir()
    data_file(folder, step=30, rank=0).write_bytes(b"half")  # killed before the manifest
    (data_file(folder, step=30, rank=0).parent / ".tatami-0123456789abcdef.part").write_bytes(b"half")
    assert_resumes(resumed(2, folder), step=20)

    def body(comm: AbstractCommunicator) -> None:
        checkpoint = opened(comm, folder)
        checkpoint.resume()
        checkpoint.save(40, state_of(comm.rank, 40))
        checkpoint.close()

    run_threads(body, size=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000020", "step-00000040"]  # nothing of 30 is left


@pytest.mark.parametrize(("file", "who"), [("rank-0001", "rank 1 of 2"), ("manifest", "every rank")])
def test_a_full_disk_is_told_on_all_ranks_and_older_checkpoints_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, who: str
) -> None:
    save_steps(2, folder, steps=(10, 20))
    replace = os.replace

    def full(part: Path, target: Path) -> None:
        if target.stem == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(part, target)

    def body(comm: AbstractCommunicator) -> str:
        checkpoint = opened(comm, folder, keep=5)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(30, state_of(comm.rank, 30))
        checkpoint.close()
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        told = run_threads(body, size=2)
    assert told[0] == told[1]
    assert f"the checkpoint of step 30 could not be written on {who}: [Errno 28] No space left on device" in told[0]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000020"]
    assert_resumes(resumed(2, folder), step=20)


def test_a_directory_that_can_not_be_written_to_is_told_before_training(world: World, folder: Path) -> None:
    (folder / "file").touch()

    def body(comm: AbstractCommunicator) -> None:
        base = Path(comm.bcast_object(folder))
        with pytest.raises(CheckpointError, match=f"rank {comm.size - 1} of {comm.size}: .*file"):
            MultiNodeCheckpoint(base / "file" / "below" if comm.rank == comm.size - 1 else base, comm)

    world(body)


@pytest.mark.parametrize("copies", [0, 1])
def test_a_step_may_be_saved_again(folder: Path, copies: int) -> None:
    save_steps(2, folder, copies=copies)
    data_file(folder, step=30, rank=0).unlink()

    def body(comm: AbstractCommunicator) -> Any:
        checkpoint = opened(comm, folder, keep=5, copies=copies)
        found = checkpoint.resume()
        assert found is not None
        assert found.step == (30 if copies else 20)
        for step in (25, 30, 25):  # 30 is of before the resume: this run has gone another way
            checkpoint.save(step, state_of(comm.rank + 7, step))
        checkpoint.close()
        return None

    run_threads(body, size=2)
    found = resumed(2, folder, copies=copies)
    assert [(step, state["rank"]) for step, state in found] == [(25, 7), (25, 8)]


def test_later_checkpoints_of_another_run_are_not_touched(folder: Path) -> None:
    save_steps(2, folder)

    def body(comm: AbstractCommunicator) -> None:
        checkpoint = opened(comm, folder)
        with pytest.raises(
            CheckpointError, match=r"has a checkpoint of step 30 that this run knows nothing of; call resume\(\)"
        ):
            checkpoint.save(5, state_of(comm.rank, 5))
        checkpoint.close()

    run_threads(body, size=2)
    assert_resumes(resumed(2, folder), step=30)


@pytest.mark.ranks(2, 3)
def test_what_can_not_be_kept_is_named_on_all_ranks(comm: AbstractCommunicator, folder: Path) -> None:
    checkpoint = opened(comm, folder)
    for state, message in (
        ({"a": [1, object()]}, rf"rank 1 of {comm.size}: state\[a.1\] is a object; a checkpoint holds tensors"),
        ({"a": {(1, 2): 3}}, rf"rank 1 of {comm.size}: the key \(1, 2\) of state\[a\] is a tuple"),
        (torch.eye(2).to_sparse(), rf"rank 1 of {comm.size}: the state is a torch.sparse_coo tensor"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.save(1, state if comm.rank == 1 else {})
    with pytest.raises(CheckpointError, match="step must be at least 0, not -1"):
        checkpoint.save(-1, {})
    with pytest.raises(InputError, match=r"the ranks are at different steps: \[0, 1"):
        checkpoint.save(comm.rank, {})
    assert checkpoint.resume() is None
    checkpoint.close()


@pytest.mark.ranks(2)
def test_options_that_can_not_be_or_differ(comm: AbstractCommunicator, folder: Path) -> None:
    for options, message in (
        ({"copies": 2}, "copies=2 for 2 ranks"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"replica_sets": [[5]]}, "there is no rank 5"),
        ({"keep": 1 + comm.rank}, "rank 0 has keep 1, rank 1 has keep 2"),
    ):
        with pytest.raises(InputError, match=message):
            opened(comm, folder, **options)
