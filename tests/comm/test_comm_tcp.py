"""What is special about ranks of torch.distributed; the other tests of communication run on them with `--world=torchrun`."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tatami.comm import AbstractCommunicator
from tatami.comm.tcp import TcpCommunicator
from tatami.errors import InputError
from tatami.testing.worlds import World


def torchrun(tmp_path: Path, script: str, *, ranks: int) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "PMIX_", "OMPI_", "MPI_"))}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(path)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env=environ,
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_init_finds_the_ranks_of_torchrun(tmp_path: Path, ranks: int) -> None:
    ended = torchrun(
        tmp_path,
        """
        import tatami, torch
        comm = tatami.init()
        total = torch.tensor([comm.rank + 1])
        comm.allreduce(total)
        parts = comm.gather_object((type(comm).__name__, comm.local_rank, total.item()))
        if comm.rank == 0:
            print(parts)
        """,
        ranks=ranks,
    )
    assert ended.returncode == 0, ended.stderr
    total = ranks * (ranks + 1) // 2
    assert ended.stdout.strip() == str([("TcpCommunicator", rank, total) for rank in range(ranks)])


def test_a_process_group_there_is_becomes_a_communicator(tmp_path: Path) -> None:
    ended = torchrun(
        tmp_path,
        """
        import tatami, torch
        import torch.distributed as dist
        from tatami.comm.tcp import TcpCommunicator
        dist.init_process_group("gloo")
        comm = tatami.init()
        pair = dist.new_group([1, 2])
        seen = [comm.size, comm.allgather_object(dist.get_rank())]
        if comm.rank > 0:
            part = TcpCommunicator.of_group(pair)
            again = TcpCommunicator.of_group(pair)
            seen += [part.rank, part.allgather_object(comm.rank), again.bcast_object(comm.rank, root=1)]
        everyone = comm.gather_object(seen)
        if comm.rank == 0:
            print(everyone)
        dist.destroy_process_group()
        """,
        ranks=3,
    )
    assert ended.returncode == 0, ended.stderr
    ranks = [0, 1, 2]
    assert ended.stdout.strip() == str([[3, ranks], [3, ranks, 0, [1, 2], 2], [3, ranks, 1, [1, 2], 2]])


def test_a_stranger_under_torchrun_takes_no_rank_and_nothing_of_it_is_unpickled(tmp_path: Path) -> None:
    """It knows the store, and writes there as rank 1, which is late; it has neither the token nor the file of this user."""
    (tmp_path / "stranger.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, tatami
            from tatami.comm.stall_report import ProcessPlace
            class Payload:
                host, kernel, pid = "host", "kernel", 1
                def __reduce__(self):
                    return pathlib.Path.touch, (pathlib.Path(__file__).with_name("owned"),)
            ProcessPlace.here = Payload
            try:
                tatami.init().allgather_object(Payload())
            except tatami.errors.CommError as error:
                print("stranger:", error, flush=True)
            """
        )
    )
    ended = torchrun(
        tmp_path,
        """
        import os, pathlib, subprocess, sys, tatami
        if os.environ["RANK"] == "1":
            path = pathlib.Path(__file__).with_name("stranger.py")
            subprocess.run([sys.executable, path], env={**os.environ, "TATAMI_TOKEN": "a stranger's token"}, check=True)
        try:
            tatami.init(timeout_s=5)
        except tatami.errors.CommError as error:
            print(error, flush=True)
        """,
        ranks=2,
    )
    assert ended.returncode == 0, ended.stderr
    assert "stranger: rank 1 of 2: who answers for rank 0" in ended.stdout
    assert "rank 0 of 2: tatami was not formed in 5 s: rank 1 did not come" in ended.stdout
    assert not (tmp_path / "owned").exists()


def test_a_rank_that_dies_is_named_to_those_who_wait_for_its_message(tmp_path: Path) -> None:
    ended = torchrun(
        tmp_path,
        """
        import os, tatami, torch
        from tatami.errors import RankDiedError
        comm = tatami.init()
        if comm.rank == 1:
            os._exit(0)
        try:
            comm.recv(torch.zeros(3), 1, tag=4)
        except RankDiedError as error:
            print(error.rank, error)
        for start in (lambda: comm.irecv(torch.zeros(3), 1), lambda: comm.isend(torch.zeros(3), 1)):
            try:
                start().wait()
            except RankDiedError as error:
                print(error.rank, error)
        """,
        ranks=2,
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == 3, ended.stderr
    assert lines[0].startswith("1 recv from rank 1 (tag 4) on rank 0 of 2: rank 1 has ended")
    assert lines[1].startswith("1 recv from rank 1 (tag 0) on rank 0 of 2: rank 1 has ended")
    assert lines[2].startswith("1 send to rank 1 (tag 0) on rank 0 of 2: rank 1 has ended")


def test_a_collective_that_times_out_is_told_and_the_rank_still_ends(tmp_path: Path) -> None:
    ended = torchrun(
        tmp_path,
        """
        import tatami, torch
        from tatami.errors import CommTimeoutError
        comm = tatami.init()
        done = torch.zeros(1)
        if comm.rank == 1:
            comm.recv(done, 0)
        else:
            comm.timeout_s = 0.2
            try:
                comm.allreduce(torch.ones(3))
            except CommTimeoutError as error:
                print(error, flush=True)
            try:
                comm.allreduce(torch.ones(30_000))
            except CommTimeoutError as error:
                print(error, flush=True)
            comm.timeout_s = 800
            comm.send(done, 1)
        """,
        ranks=2,
    )
    few, many = ended.stdout.splitlines()
    assert few.startswith("allreduce on rank 0 of 2 timed out after 0.2 s: rank 1 did not join."), ended.stderr
    assert many == few
    assert ended.returncode == 0, ended.stderr


@pytest.mark.ranks(1, 2)
def test_windows_are_what_the_mpi_backend_has(world: World) -> None:
    if world.kind != "torchrun":
        pytest.skip("asked of ranks of torch.distributed only")

    def body(comm: AbstractCommunicator) -> None:
        assert isinstance(comm, TcpCommunicator)
        for ask in (comm.window, comm.shared_window):
            with pytest.raises(
                InputError, match="no one-sided communication; the MPI backend has: start the ranks with mpiexec"
            ):
                ask(4, torch.float32)

    world(body)
