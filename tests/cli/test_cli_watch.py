"""`tatami watch`: how a run stands, from a log that grows."""

import codecs
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cli.watch import follow, frame, sparkline
from tatami.errors import InputError
from tatami.report.page import GrowingLog, read_run
from tatami.report.page.record_shapes import PHASES

TILES = [
    {"processor": "p0", "replica": 0, "samples": [0, 60], "units": [0, 90]},
    {"processor": "p1", "replica": 0, "samples": [0, 60], "units": [90, 120]},
]
RANKS = {name: {f"{phase}_s": 0.02 for phase in PHASES[:5]} for name in ("p0", "p1")}
TILING = {"samples": 60, "units": 120, "tiles": TILES}
RUN: list[dict[str, Any]] = [
    {"event": "tiling", "iteration": 0, "why": "", "tiling": TILING, "speeds": {"p0": 3, "p1": 1}},
    {"event": "phases", "iteration": 10, "iterations": 10, "ranks": RANKS},
    {"event": "train", "iteration": 10, "epoch": 1, "loss": 2.0, "samples_per_s": 500.0},
    {"event": "train", "iteration": 20, "epoch": 2, "loss": float("nan"), "samples_per_s": 400.0},
    {"event": "check", "iteration": 20, "decision": "re-map whole", "reason": "p1 is slow", "imbalance": 2.0, "moved_units": 9},
    {"event": "train", "iteration": 1030, "epoch": 3, "loss": 0.5, "samples_per_s": 450.0},
]  # fmt: skip


def written(path: Path, records: list[dict[str, Any]], *, rest: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + rest, encoding="utf-8")
    return path


def test_the_values_of_the_log_are_shown(tmp_path: Path) -> None:
    processes = {"event": "processes", "iteration": 0, "ranks": {"p0": "41 on old", "p1": "42 on new"}}
    gone = {**RUN[0], "iteration": 464, "why": "p2 gone"}
    shown = CliRunner().invoke(app, ["watch", str(written(tmp_path / "run.jsonl", [processes, gone, *RUN[1:]]))])
    assert shown.exit_code == 0, shown.output
    for words in (
        "run.jsonl  iteration 1,030 in epoch 4  running",
        "loss      2 █ ▁ 0.5",
        "samples/s 500 █▁▅ 450",
        "60 samples x 120 units in 1 replica",
        "share of the work; speed, relative to the fastest rank; then milliseconds of",
        "after iteration 20: p1 is slow",
        "after iteration 464: p2 gone",
    ):
        assert words in shown.stdout
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["p0", "75.0", "%", "1.00", "2", "2", "2", "2", "2", "41", "on", "old"] in lines
    assert ["p1", "25.0", "%", "0.33", "2", "2", "2", "2", "2", "42", "on", "new"] in lines


def test_large_numbers_are_written_out_and_processes_leave_room_for_the_phases(tmp_path: Path) -> None:
    processes = {"event": "processes", "iteration": 0, "ranks": {"p0": "41 on old", "p1": "42 on new"}}
    last = {**RUN[2], "iteration": 1040, "loss": 1234.4, "samples_per_s": 154585.1}
    log = written(tmp_path / "run.jsonl", [processes, *RUN, last])
    shown = CliRunner().invoke(app, ["watch", str(log)]).stdout
    assert " 1,234\n" in shown
    assert " 154,585\n" in shown
    narrow = io.StringIO()
    Console(file=narrow, width=76).print(frame(read_run(log), name="run.jsonl", columns=76))
    assert "on old" not in narrow.getvalue()
    assert "…" not in narrow.getvalue()


@pytest.mark.parametrize("loss", [float("nan"), None])
def test_a_last_loss_that_is_not_a_number_is_shown(tmp_path: Path, loss: float | None) -> None:
    log = written(tmp_path / "run.jsonl", [*RUN, {**RUN[2], "iteration": 1040, "loss": loss}])
    assert "loss      2 █ ▁  nan" in CliRunner().invoke(app, ["watch", str(log)]).stdout


@pytest.mark.parametrize("rest", [[], [{"event": "end", "iteration": 3, "stopped": "epochs"}]])
def test_a_run_without_losses_says_when_they_come(tmp_path: Path, rest: list[dict[str, Any]]) -> None:
    shown = CliRunner().invoke(app, ["watch", "--once", str(written(tmp_path / "run.jsonl", [RUN[0], *rest]))])
    assert ("no loss yet: a Trainer writes it every record_every iterations" in shown.stdout) == (not rest)


def test_curves_are_thinned_to_the_width() -> None:
    assert sparkline([float(n) for n in range(800)], columns=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, None, 3.0], columns=8) == "▁ ▁"
    assert sparkline([None], columns=8) == " "


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    log = GrowingLog(tmp_path / "run.jsonl")
    assert log.read() is None
    marked = written(tmp_path / "marked.jsonl", RUN[:1])
    marked.write_bytes(codecs.BOM_UTF8 + marked.read_bytes())
    assert read_run(marked) == GrowingLog(marked).read()
    written(tmp_path / "run.jsonl", RUN[:2], rest='{"event": "tr')
    first = log.read()
    assert first is not None
    assert list(first.records) == RUN[:2]
    assert log.read() == first
    assert log.read() is None or len(log.read().records) == 2  # type: ignore[union-attr]
    written(tmp_path / "run.jsonl", RUN[:3])
    more = log.read()
    assert more is not None
    assert list(more.records) == RUN[:3]
    written(tmp_path / "run.jsonl", RUN[:1])  # a new run
    again = log.read()
    assert again is not None
    assert list(again.records) == RUN[:1]
    written(tmp_path / "run.jsonl", RUN[:1], rest="no\n")
    with pytest.raises(InputError, match=r"line 2 of .*run\.jsonl is not JSON: 'no'"):
        log.read()


class Steps:
    """A clock whose sleeps are the steps of a story."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps
        self.num_slept = 0

    def now_s(self) -> float:
        return 0.0

    def sleep(self, duration_s: float) -> None:
        assert duration_s < 10
        self.num_slept += 1
        if self.steps:
            self.steps.pop(0)()


def test_it_waits_for_the_log_shows_what_comes_and_ends_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    end = {"event": "end", "iteration": 1030, "stopped": "epochs"}
    clock = Steps([lambda: None, lambda: written(path, RUN[:3]), lambda: written(path, [*RUN, end])])
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    follow(GrowingLog(path), name="run.jsonl", console=console, clock=clock)
    said = screen.getvalue()
    assert said.index("waiting for run.jsonl") < said.index("in epoch 2") < said.index("ended (epochs)")
    assert clock.num_slept < 20
