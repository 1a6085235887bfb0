"""A job on this machine: its token, what PMI answers its ranks, and what is left of it in shared memory."""

import mmap
import os
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tatami.comm import launch
from tatami.comm.job_token import job_token
from tatami.comm.launch import without_leftovers
from tatami.comm.pmi import PmiServer, Reply
from tatami.errors import InputError

ONE_HOST = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("environ", "is_local"),
    [
        (ONE_HOST, True),
        ({**ONE_HOST, "WORLD_SIZE": "8"}, False),
        ({**ONE_HOST, "WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}, False),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "node1"}, False),
        ({}, False),
    ],
)
def test_ranks_of_one_host_share_a_file_that_only_this_user_can_read(
    environ: dict[str, str], is_local: bool, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: job_token(environ), range(8)))
    assert len(tokens) == 1
    folder = tmp_path / f"tatami-{os.geteuid()}"
    if is_local:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [(each.name, stat.S_IMODE(each.stat().st_mode)) for each in folder.iterdir()] == [("token", 0o600)]
        assert tokens == {(folder / "token").read_bytes()}
        assert len(tokens.pop()) == 32
    else:
        assert tokens == {b""}
        assert not folder.exists()
    assert job_token({**environ, "TATAMI_TOKEN": "a" * 16}) == b"a" * 16


def test_a_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(InputError, match="TATAMI_TOKEN has 5 characters, which can be guessed; give all ranks the same 16"):
        job_token({"TATAMI_TOKEN": "short"})


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_folder_that_may_be_anothers_is_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / f"tatami-{os.geteuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o750)
    with pytest.raises(InputError, match=r"must be a folder that only user \d+ can enter, .*; remove it, or set TATAMI_TOKEN"):
        job_token(ONE_HOST)


def test_only_new_files_that_nobody_has_mapped_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHARED_MEMORY", tmp_path)
    names = {name: tmp_path / name for name in ("mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_3_0", "plasma")}
    old, left, live, other = names.values()
    old.touch()
    os.utime(old, (time.time() - 60,) * 2)
    with without_leftovers():
        for path in (left, live, other):
            path.write_bytes(bytes(mmap.PAGESIZE))
        file = live.open("r+b")
        memory = mmap.mmap(file.fileno(), 0)
        file.close()
    assert {path for path in names.values() if path.exists()} == {old, live, other}
    memory.close()


def test_they_are_removed_where_the_job_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHARED_MEMORY", tmp_path)

    def job() -> None:
        (tmp_path / "mpich_shm_4_0").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), without_leftovers():
        job()
    assert not list(tmp_path.iterdir())


def said(server: PmiServer, rank: int, line: str) -> list[str]:
    replies = server.handle(rank, line)
    assert all(reply.rank == rank for reply in replies)
    return [reply.line for reply in replies]


def test_ranks_join_and_leave() -> None:
    server = PmiServer(2)
    greeting = "cmd=init pmi_version=1 pmi_subversion=1"
    assert said(server, 1, greeting) == ["cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"]
    assert (server.joined, server.left) == ({1}, set())
    assert said(server, 1, "cmd=get_universe_size") == ["cmd=universe_size size=2 rc=0"]
    assert said(server, 1, "cmd=finalize") == ["cmd=finalize_ack rc=0"]
    assert (server.joined, server.left) == ({1}, {1})


def test_what_one_rank_puts_another_gets_though_it_has_signs_of_its_own() -> None:
    server = PmiServer(2)
    assert said(server, 0, "cmd=put kvsname=x key=P0-card value=0A=f#3;b:c") == ["cmd=put_result rc=0 msg=success"]
    assert said(server, 1, "cmd=get kvsname=x key=P0-card") == ["cmd=get_result rc=0 msg=success value=0A=f#3;b:c"]
    assert said(server, 1, "cmd=get kvsname=x key=P1-card") == ["cmd=get_result rc=-1 msg=key_not_found value=unknown"]


def test_all_ranks_are_on_one_machine() -> None:
    answer = said(PmiServer(3), 2, "cmd=get kvsname=x key=PMI_process_mapping")
    assert answer == ["cmd=get_result rc=0 msg=success value=(vector,(0,1,3))"]


def test_ranks_meet_when_the_last_has_come_and_may_meet_again() -> None:
    server = PmiServer(3)
    for _ in range(2):
        assert server.handle(2, "cmd=barrier_in") == server.handle(0, "cmd=barrier_in") == []
        assert server.handle(1, "cmd=barrier_in") == [Reply(rank=rank, line="cmd=barrier_out rc=0") for rank in range(3)]


def test_a_rank_that_wants_the_end_is_noted_with_its_exit_code() -> None:
    server = PmiServer(2)
    assert server.handle(1, "cmd=abort exitcode=7 message=gone") == []
    assert server.aborted == {1: 7}


def test_no_two_jobs_have_one_name_for_mpi_names_its_shared_memory_after_it() -> None:
    names = {said(PmiServer(1), 0, "cmd=get_my_kvsname")[0] for _ in range(20)}
    assert len(names) == 20


def test_what_only_mpiexec_has_is_refused_and_not_left_without_an_answer() -> None:
    assert said(PmiServer(1), 0, "mcmd=spawn") == ["cmd=spawn_result rc=-1 msg=not_supported info=not_supported"]
    published = said(PmiServer(1), 0, "cmd=publish_name service=x port=y")
    assert published == ["cmd=publish_result rc=-1 msg=not_supported info=not_supported"]
