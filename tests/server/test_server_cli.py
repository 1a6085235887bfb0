"""`tatami server`: what it refuses, and what it tells of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.server.report import Failure, RunReport

FAILURE = Failure(at_s=4.0, who="worker 1", process=1, how="died", silent_s=0.1, round=2, lost_s=1.25)
REPORT = RunReport(recovery="ignore", reached_s=(0.0, 1.0, 2.0, 5.0), losses=(3.0, 2.0, 1.5), failures=(FAILURE,), workers=3)


def test_the_report_tells_of_each_failure_and_draws_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    REPORT.save(tmp_path / "run.json")
    arguments = ["server", "report", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "3 rounds in 5 s, recovery ignore" in result.stdout
    assert ["4.00", "s", "worker", "1", "died", "2", "0.10", "s", "1.25", "s"] in [
        line.split() for line in result.stdout.splitlines()
    ]
    assert (tmp_path / "run.png").stat().st_size > 5_000


def test_the_report_as_json(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "run.json")
    result = CliRunner().invoke(app, ["server", "report", str(tmp_path / "run.json"), "--json"])
    record = json.loads(result.stdout)
    assert (record["rounds"], record["loss"], record["failures"][0]["lost_s"]) == (3, 1.5, 1.25)


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (None, [], "there is no script"),
        ("model_fn = 1\n", [], "it lacks loss_fn, dataset"),
        ("model_fn = loss_fn = dataset = 1\n", ["--recovery", "checkpoint", "--every", "often"], "or 'daly', not 'often'"),
    ],
)
def test_refused_before_anything_starts(script: str | None, options: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    if script is not None:
        path.write_text(script)
    result = CliRunner().invoke(app, ["server", "train", str(path), *options])
    assert result.exit_code == 2
    assert words in result.stderr
