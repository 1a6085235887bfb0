"""The faults of `test_functions_never_hangs.py` in real MPI jobs: all ranks learn who waited for whom; a dead rank ends all."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="needs the extra 'mpi'")

if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")):
    pytest.skip("inside mpiexec no other mpiexec can be started", allow_module_level=True)

HEAD = """
import os, signal, time, torch, tatami
from tatami import functions
from tatami.errors import CommError

comm = tatami.init(timeout_s=1000)
x = torch.ones(200_000, requires_grad=True)
meeting = comm.duplicate()
with torch.no_grad():
    functions.allreduce(x, meeting)  # what is done the first time takes no part of the timeout
comm.barrier()
comm.timeout_s = 10.0

def tell(body):
    try:
        body()
    except CommError as error:
        # Not printed: the launcher mixes what ranks print at the same time.
        open(__file__ + str(comm.rank), "w").write(str(error))
    meeting.barrier()
    os._exit(0)
"""


def said(tmp_path: Path, script: str, *, ranks: int) -> tuple[int, dict[int, str]]:
    """The exit code, and what each rank said."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + textwrap.dedent(script), encoding="utf-8")
    command = [sys.executable, "-m", "tatami", "run", "-n", str(ranks), str(path)]
    code = subprocess.run(command, check=False, timeout=800).returncode
    files = {rank: Path(f"{path}{rank}") for rank in range(ranks)}
    return code, {rank: file.read_text() for rank, file in files.items() if file.exists()}


def test_missing_send_in_a_ring(tmp_path: Path) -> None:
    script = "tell(lambda: functions.recv(comm, source=(comm.rank + 1) % comm.size))"
    _, errors = said(tmp_path, script, ranks=3)
    assert sorted(errors) == [0, 1, 2]
    for error in errors.values():
        for rank in range(3):
            assert f"rank {rank} waits for rank {(rank + 1) % 3} in recv (forward, tag 0, message 0)" in error
        assert "script.py:" in error


def test_send_that_nobody_receives(tmp_path: Path) -> None:
    script = """
    def body():
        if comm.rank == 0:
            functions.send(x, comm, dest=1)
            functions.backward()
        else:
            functions.allreduce(x, comm)
    tell(body)
    """
    _, errors = said(tmp_path, script, ranks=2)
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert "rank 0 waits for rank 1 in the backward pass of send" in error
        assert "rank 1 waits for rank 0 in allreduce (forward, collective 0, root 0)" in error


def test_different_shapes(tmp_path: Path) -> None:
    script = "tell(lambda: functions.allreduce(torch.ones(2 + comm.rank // 2), comm))"
    _, errors = said(tmp_path, script, ranks=3)
    assert sorted(errors) == [0, 1, 2]
    for error in errors.values():
        assert "float32 (2,)" in error
        assert "float32 (3,)" in error


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], victim: int) -> None:
    """The launcher knows who died; MPI ends the others before they could."""
    script = f"""
    def body():
        y = functions.allreduce(x, comm)
        if comm.rank == {victim}:
            os.kill(os.getpid(), signal.SIGKILL)
        y.sum().backward()
    tell(body)
    """
    code, errors = said(tmp_path, script, ranks=3)
    assert code != 0
    said_last = capfd.readouterr().err
    first = next(line for line in said_last.splitlines() if line.startswith("tatami run: rank"))
    assert first.startswith(f"tatami run: rank {victim} (pid ")
    assert first.endswith("was killed by signal 9 (SIGKILL); the other ranks are stopped")
    assert victim not in errors


def test_a_program_may_end_while_a_gradient_is_awaited(tmp_path: Path) -> None:
    """With stages a forward pass expects the gradient of what it hands over, and no backward pass follows this one."""
    script = """
    from torch import nn
    network = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))
    model = tatami.tile(network, comm, batch_size=12, sample=torch.ones(3, 6), speeds="equal", stages=2, quiet=True)
    model(model.local(torch.ones(12, 6)))
    open(__file__ + str(comm.rank), "w").write("done")
    """
    assert said(tmp_path, script, ranks=2) == (0, {0: "done", 1: "done"})
