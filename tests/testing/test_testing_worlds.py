"""The plugin of worlds of ranks, as a job of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.ranks(2)
def test_rank_1_fails_alone(world):
    rank = world(lambda comm: comm.rank)[0]
    from tatami.comm.detect import init
    assert init(backend="mpi").rank == 0, "only here"

@pytest.mark.ranks(2)
def test_all_fail(world):
    def body(comm):
        assert comm.rank == 0, "told by rank 0"
    world(body)
"""


def test_what_fails_on_another_rank_alone_is_told_by_rank_0(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "test_ranks.py").write_text(TESTS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "PMIX_", "OMPI_", "MPI_"))}
    ended = subprocess.run(
        [Path(sys.executable).with_name("mpiexec"), "-n", "2", sys.executable, "-m", "pytest", "-q", "-m", "mpi", "--world=mpi",
         "-p", "tatami.testing.worlds", "-p", "no:cacheprovider", "test_ranks.py"],
        cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode != 0, ended.stdout
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr  # as rank 0 sees it
    assert ended.stdout.count("test_rank_1_fails_alone[n2] failed on rank 1 of 2 and not on rank 0:") == 1, ended.stdout
    assert "only here" in ended.stdout
    assert "test_all_fail[n2] failed on rank" not in ended.stdout
