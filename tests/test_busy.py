"""Tests beside busy loops: the loops are gone with the command, parts are as long as each other, and files stay together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parts import COSTS_S, cost_s, group_of, parts

TESTS = Path(__file__).parent
BUSY = TESTS / "busy.py"
CHILDREN = "import os, pathlib; print(*pathlib.Path(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read_text().split())"


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder above is common to all
        (tmp_path_factory.getbasetemp().parent / "of-test-busy").touch(exist_ok=False)


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


@pytest.mark.parametrize("number", [1, 7])
def test_every_file_is_in_one_part_and_parts_take_as_long_as_each_other(number: int) -> None:
    files = list(TESTS.rglob("test_*.py"))
    assert COSTS_S.keys() <= {file.name for file in files}
    shared = parts(files, number)
    assert sorted(file for part in shared for file in part) == sorted(files)
    loads_s = [sum(cost_s(file.name) for file in part) for part in shared]
    assert max(loads_s) - min(loads_s) <= max(map(cost_s, (file.name for file in files)))
    assert shared == parts(files[::-1], number), "the same in every run"


@pytest.mark.parametrize(("asked", "words"), [("2/2", []), ("0/2", None), ("3/2", None), ("1/1", None), ("one", None)])
def test_the_last_part_is_what_is_no_file_and_others_are_refused(asked: str, words: list[str] | None) -> None:
    done = subprocess.run([sys.executable, str(TESTS / "parts.py"), asked], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == ((0, words) if words is not None else (1, []))
    assert ("as in PART=3/8" in done.stderr) == (words is None)


def test_the_tests_of_a_file_stay_together_and_all_that_start_ray() -> None:
    """Under `pytest -n`, that this file's do is seen by `_one_process`."""
    assert group_of("tests/server/test_a.py::test_1[a::b]") == group_of("tests/elastic/test_b.py::test_2") == "ray"
    assert group_of("tests/comm/test_c.py::test_3") == group_of("tests/comm/test_c.py::test_4[x]") == "tests/comm/test_c.py"
