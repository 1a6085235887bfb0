"""What `make test` runs its tests by: output is shown and kept, and a process that is left over does not hold up the rest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_busy import TESTS

LEAVES = """
import faulthandler, os, sys, time
faulthandler.enable()
print("before", flush=True)
if os.fork() == 0:
    while True:
        time.sleep(1)
print(os.getpid(), "leaves one")
raise SystemExit(7)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc, as Linux has it")
def test_a_process_that_is_left_over_is_named_and_says_where_it_is(tmp_path: Path) -> None:
    words = [sys.executable, str(TESTS / "logged.py"), str(tmp_path / "log"), sys.executable, "-c", LEAVES, "the-name"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TATAMI_LEFT_OVER_S": "0.5"})
    assert done.returncode == 7, done.stderr
    assert "before\n" in done.stdout
    assert "leaves one\n" in done.stdout
    assert "left over, and ended: " in done.stdout
    assert "the-name" in done.stdout
    kept = (tmp_path / "log").read_text()
    assert "Fatal Python error: Aborted" in kept
    assert 'File "<string>", line 7 in <module>' in kept


def test_what_ends_by_itself_is_not_named(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1); print(\"late\")'])"
    words = [sys.executable, str(TESTS / "logged.py"), str(tmp_path / "log"), sys.executable, "-c", script]
    (tmp_path / "log").write_text("earlier\n")
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "late\n")
    assert (tmp_path / "log").read_text() == "earlier\nlate\n"
