"""The loops that the tests can be run beside are there while the command runs, and gone after it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

BUSY = Path(__file__).with_name("busy.py")
CHILDREN = "import os, pathlib; print(*pathlib.Path(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read_text().split())"


def ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_loops_run_beside_the_command_and_end_with_it() -> None:
    script = CHILDREN + "; raise SystemExit(7)"
    done = subprocess.run(
        [sys.executable, str(BUSY), "--loops", "3", sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 7
    assert len(pids := done.stdout.split()) == 3 + 1, "the loops, and the command itself"
    assert all(ended(pid) for pid in pids)


def test_loops_end_where_the_whole_is_killed() -> None:
    script = CHILDREN + "; import sys, signal; sys.stdout.close(); signal.pause()"
    words = [sys.executable, str(BUSY), "--loops", "2", sys.executable, "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdout is not None
        pids = busy.stdout.readline().split()
        assert len(pids) == 3
        busy.kill()
    for pid in pids[:2]:
        while not ended(pid):  # ends by the test's own timeout if it stays
            os.sched_yield()
    os.kill(int(pids[2]), signal.SIGKILL)
