"""`tatami run`, ended by a signal at any moment: it leaves no process and no file. `make chaos` does it 100 times."""

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="needs the extra 'mpi'")

if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
    pytest.skip("inside mpiexec no other ranks can be started", allow_module_level=True)

RUNS = int(os.environ.get("TATAMI_LAUNCH_CHAOS_RUNS", "3"))
SEED = int(os.environ.get("TATAMI_CHAOS_SEED", "0"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
LONGEST_S = 6.0
"""What the start of a job and its few iterations take on a machine that does nothing else."""
PATIENCE_S = 800.0
SCRIPT = """
import torch
from tatami.comm import AllReduce, AllReduceSpec, init
comm = init(timeout_s=1000)
reduce = AllReduce(comm, AllReduceSpec(size=1 << 16))
for _ in range(2000):
    reduce.run()
"""


@pytest.mark.parametrize("number", range(RUNS))
def test_a_run_that_is_ended_at_any_moment_leaves_nothing(tmp_path: Path, number: int) -> None:
    chance = random.Random(f"{SEED}/{number}")
    how, ranks, moment_s = SIGNALS[number % len(SIGNALS)], chance.randint(1, 4), chance.uniform(0.0, LONGEST_S)
    mark = secrets.token_hex(8)
    (tmp_path / "files").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "TMPDIR": str(tmp_path / "files"), "TATAMI_TEST_MARK": mark}
    command = [sys.executable, "-m", "tatami", "run", "-n", str(ranks), "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            process.wait(moment_s)
        except subprocess.TimeoutExpired:
            process.send_signal(how)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (0, 128 + how, -how), said
    assert_gone(mark)
    assert list((tmp_path / "files").iterdir()) == []
    if how != signal.SIGKILL:
        assert "Traceback" not in said or how == signal.SIGINT


def assert_gone(mark: str) -> None:
    """The kernel ends the ranks of one that was killed, in its own time."""
    deadline_s = time.monotonic() + PATIENCE_S
    while left := processes_of(mark):
        assert time.monotonic() < deadline_s, f"still there: {left}"
        time.sleep(0.02)


def processes_of(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
        except OSError:  # it has ended, or is another user's
            continue
    return found
