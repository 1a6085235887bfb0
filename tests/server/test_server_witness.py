"""A run whose process ends without a word has a witness, who writes the report and says what there is to go on with."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tatami.report.server_run import Failure
from tatami.server import RunReport, checkpoints
from tatami.server.saving import Saved
from tatami.server.witness import Witness, account

FIRST = {"pid": 7, "recovery": "ignore", "start": 3, "report": None, "directory": None}
BEGUN = {"event": "begun", "workers": 2, "startup_s": 1.5}
FAILED = {"event": "failure", "iteration": 4, "who": "worker 1", "process": 1, "how": "died", "at_s": 2.0, "silent_s": 0.1}
RECORDS: list[dict[str, Any]] = [
    FIRST,
    BEGUN,
    {"event": "round", "iteration": 4, "at_s": 1.0, "loss": 0.5, "updates": 2, "samples": 9},
    FAILED,
    {"event": "warning", "iteration": 4, "message": "one is gone"},
    {"event": "round", "iteration": 5, "at_s": 3.0, "loss": 0.25, "updates": 1, "samples": 9},
    {"event": "round", "iteration": 6, "at_s": 4.5, "loss": 0.125, "updates": 2, "samples": 9},
]


def test_the_report_is_that_of_the_run() -> None:
    told = account(RECORDS)
    assert told is not None
    assert told[0] == RunReport(
        recovery="ignore",
        start=3,
        reached_s=(0.0, 1.0, 3.0, 4.5),
        losses=(0.5, 0.25, 0.125),
        failures=(Failure(at_s=2.0, who="worker 1", process=1, how="died", silent_s=0.1, round=4, lost_s=0.5),),
        warnings=("one is gone",),
        workers=2,
        startup_s=1.5,
    )
    assert told[1].startswith("the run stopped after 6 rounds: its process (7) ended without a word: it was killed, or Ray")


def test_what_was_known_of_the_cause_is_said() -> None:
    told = account([*RECORDS, {"event": "fault", "what": "the raylet is gone"}])
    assert told is not None
    assert told[1] == "the run stopped after 6 rounds: the raylet is gone."


def test_of_a_run_that_tells_of_its_end_itself_nothing_is_said() -> None:
    assert account([*RECORDS, {"event": "over"}]) is None


def test_a_run_that_ended_before_its_first_round() -> None:
    told = account([FIRST | {"start": 0}])
    assert told is not None
    assert (told[0].rounds, told[0].reached_s) == (0, ())


SCRIPT = """
import os, signal, sys
from pathlib import Path
from tatami.server.witness import Witness
with Witness(recovery="ignore", start=0, report=sys.argv[1], directory=Path(sys.argv[2])) as witness:
    witness.began(workers=2, startup_s=1.5)
    for number in range(1, 5001):
        witness.write("round", iteration=number, values={"at_s": float(number), "loss": 1 / number})
    {end}
"""


def run(end: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    report, directory = folder / "report.json", folder / "run"
    words = [sys.executable, "-c", SCRIPT.replace("{end}", end), str(report), str(directory)]
    return subprocess.run(words, capture_output=True, text=True, timeout=800, check=False), report


@pytest.mark.parametrize(("end", "code"), [("os._exit(1)", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)])
def test_a_process_that_is_gone_without_a_word_leaves_a_report_and_a_message(end: str, code: int, tmp_path: Path) -> None:
    shard = {"parameters": np.zeros(2, np.float32), "count": np.array([8])}
    checkpoints.write(tmp_path / "run", [shard], saved=Saved(version=8, clocks=((0, 8),)), terms={})
    done, path = run(end, tmp_path)  # returns when the witness, too, has closed what it was given to write to
    assert done.returncode == code
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: the run stopped after ")
    assert f"What happened is in {path}. The state of version 8 is saved in {tmp_path / 'run'}: `tatami server resume" in said
    report = RunReport.load(path)
    assert report.losses == tuple(1 / number for number in range(1, report.rounds + 1))
    assert report.rounds > 0


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)"])
def test_a_process_that_ends_as_usual_is_not_spoken_for(end: str, tmp_path: Path) -> None:
    done, path = run(end, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not path.exists()


def test_a_witness_that_is_stopped_does_not_hold_up_the_run() -> None:
    """The pipe has room for 64 KiB, and this is more; it is kept and sent with the end."""
    with Witness(recovery="ignore", start=0, report=None, directory=None) as witness:
        os.kill(witness.pid, signal.SIGSTOP)
        for number in range(1, 5001):
            witness.write("round", iteration=number, values={"at_s": float(number), "loss": 1 / number})
        os.kill(witness.pid, signal.SIGCONT)
