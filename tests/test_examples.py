"""The examples run as their first lines say, and do what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(example: str, *, ranks: int) -> str:
    command = [sys.executable, "-m", "tatami", "run", "-n", str(ranks), str(EXAMPLES / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ten_lines_learn_the_digits(ranks: int) -> None:
    accuracy = re.search(r"accuracy ([\d.]+)%", run("ten_lines.py", ranks=ranks))
    assert accuracy is not None
    assert float(accuracy[1]) > 95


def test_own_loop_checks_its_balance_every_20_iterations() -> None:
    checks = re.findall(r"^check (\d) \(iteration (\d+)\)", run("own_loop.py", ranks=2), flags=re.MULTILINE)
    assert checks == [("1", "20"), ("2", "40"), ("3", "60"), ("4", "80"), ("5", "100")]


@pytest.mark.parametrize("launcher", ["tatami run", "torchrun"])
def test_data_parallel_learns_the_digits_however_it_is_started(launcher: str) -> None:
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command.append(str(EXAMPLES / "data_parallel.py"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr
        said = done.stdout
    else:
        said = run("data_parallel.py", ranks=2)
    accuracy = re.search(r"accuracy ([\d.]+)%", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 95
