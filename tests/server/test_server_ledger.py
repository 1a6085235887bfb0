"""The books of a run say what was applied and what it cost; the same is written down, line by line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tatami.records import Records
from tatami.server.actions import Contribution
from tatami.server.ledger import Ledger
from tatami.server.report import Failure
from tatami.server.worker_process import TaskOutcome


def _run(path: Path) -> Ledger:
    """From version 7: three rounds, worker 1 missing in the second, where it died; each is told twice, and counted once."""
    ledger = Ledger(recovery="ignore", start=7, sinks=[Records(path)])
    ledger.began(startup_s=3.0)
    for round_, at_s in ((7, 1.0), (8, 4.0), (9, 5.0)):
        present = (0,) if round_ == 8 else (0, 1)
        for worker in present:
            outcome = TaskOutcome(loss=float(round_ + worker), samples=10 * (worker + 1), received=())
            ledger.worked(worker=worker, round=round_, outcome=outcome)
        if round_ == 8:
            ledger.failed(Failure(at_s=2.5, who="worker 1", process=1, how="died", silent_s=0.5, round=8))
        ledger.applies(round_ + 1, [Contribution(worker=worker, process=worker, round=round_) for worker in present])
        assert ledger.reached(round_ + 1, at_s=at_s)
        assert not ledger.reached(round_ + 1, at_s=at_s + 0.5)
    return ledger


def test_a_report_has_rounds_losses_and_what_a_failure_cost(tmp_path: Path) -> None:
    report = _run(tmp_path / "run.jsonl").report(workers=2)
    assert report.reached_s == (0.0, 1.0, 4.0, 5.0)
    assert report.losses == pytest.approx((7 + 20 / 30, 8, 9 + 20 / 30))
    assert [failure.lost_s for failure in report.failures] == [2.0]  # 3 s for a round that takes 1 s
    assert (report.start, report.rounds, report.workers, report.startup_s, report.recovery) == (7, 10, 2, 3.0, "ignore")


def test_all_is_written_down_as_it_happens(tmp_path: Path) -> None:
    ledger = _run(tmp_path / "run.jsonl")
    with pytest.warns(UserWarning, match="no room"):
        ledger.warn("no room", version=10)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["event"], line["iteration"]) for line in lines] == [
        ("round", 8),
        ("failure", 8),
        ("round", 9),
        ("round", 10),
        ("warning", 10),
    ]
    assert {"updates": 1, "samples": 10, "loss": 8.0, "at_s": 4.0}.items() <= lines[2].items()
    assert {"who": "worker 1", "how": "died", "silent_s": 0.5}.items() <= lines[1].items()
    assert ledger.report(workers=2).warnings == ("no room",)


def test_the_last_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    ledger = _run(tmp_path / "run.jsonl")
    for worker, round_ in ((1, 11), (0, 10)):
        ledger.worked(worker=worker, round=round_, outcome=TaskOutcome(loss=math.nan, samples=1, received=()))
    assert ledger.last_not_finite() == (1, 11)
