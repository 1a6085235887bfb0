"""Processes of simulated runs end with the one that started them, however that ends."""

import signal
import subprocess
import sys

SCRIPT = """
import os, signal
from tatami.sim.processes import Runs
with Runs(cores=2) as runs:
    runs.map(abs, [1, 2, 3])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_they_end_where_it_is_killed() -> None:
    """They hold its output, which is read to its end here: by the test's timeout where one of them stays."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")
