"""`tatami server`: what it refuses, and what it tells of a run."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from hand_clock import HandClock
from tatami.cli.app import app
from tatami.cli.server import shown_rounds
from tatami.progress import LineProgress
from tatami.report.server_run import Failure, RunReport, RunStatus
from tatami.server import RunControl

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


GOOD = """
import torch
from torch import nn
def model_fn():
    return nn.Linear(3, 1)
loss_fn = nn.MSELoss()
dataset = (torch.zeros(8, 3), torch.zeros(8, 1))
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys\n\nsys.exit(0)\n", "script.py, line 3: it ends the process (exit code 0) before its values could be read"),
        ("raise SystemExit\n", "script.py, line 1: it ends the process (exit code None)"),
        ("def model_fn():\n    return (\n", "script.py, line 2: '(' was never closed; this is not Python 3."),
        ("x = 1\0\n", "script.py"),
        ("\nimport no_such_module\n", "script.py, line 2: there is no module 'no_such_module'; install it for this Python ("),
        ("from torch import no_such_name\n", "script.py, line 1: ImportError: cannot import name 'no_such_name' from 'torch'"),
        ("def f():\n    return 1 / 0\n\nf()\n", "script.py, line 2: ZeroDivisionError: division by zero"),
        ("raise ValueError('one\\ntwo')\n", "script.py, line 1: ValueError: one"),
        (GOOD.replace("return nn.Linear(3, 1)", "raise SystemExit(0)"), "model_fn ends the process (exit code 0)"),
        (GOOD.replace("return nn", "nn"), "model_fn must return a torch.nn.Module, not None"),
        (GOOD + "model_fn = 1\n", "model_fn must be a function, not 1"),
        (GOOD + "loss_fn = 'mse'\n", "loss_fn must be a function, not 'mse'"),
        (GOOD + "dataset = 7\n", "dataset must be a pair of tensors, or have a length and dataset[i] == (x, y); int has not"),
        (GOOD + "dataset = ([1], [2])\n", "a pair of tensors (samples, ...), inputs and targets, not (list, list)"),
        (GOOD + "dataset = dataset[:1]\n", "inputs and targets, not (Tensor)"),
    ],
)
def test_a_script_that_cannot_be_trained_is_refused_in_one_sentence(script: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path = tmp_path / "script.py"
    path.write_text(script)
    result = CliRunner().invoke(app, ["server", "train", str(path)])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--spares", "100000"], "4 workers, 2 servers and 100000 spares are 100006 processes; a run has at most 4096"),
        (["--spares", "4000"], "4004 workers and spares and 2 servers need 671 GiB of memory"),
        (["--workers", "1000000000"], "1000000003 processes; a run has at most 4096"),
        (["--lr", "nan"], "must be a finite number, not nan"),
        (["--lr", "1e400"], "must be a finite number, not inf"),
        (["--momentum", "nan"], "must be a finite number, not nan"),
        (["--clip-norm", "nan"], "must be a finite number, not nan"),
        (["--heartbeat", "inf"], "must be a finite number, not inf"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_starts(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4 * 2**20}.__getitem__)
    path = tmp_path / "script.py"
    path.write_text(GOOD)
    result = CliRunner().invoke(app, ["server", "train", str(path), *options])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output


STATUS = RunStatus(round=3, rounds=9, commits_per_s=1.5, workers=4, spares=1, servers=2, deaths=2, lost_s=3.25, loss=0.5)


class Run:
    coordinator = SimpleNamespace(settings=SimpleNamespace(rounds=9))

    def status(self) -> RunStatus:
        return STATUS


def test_how_a_run_stands_is_shown_while_it_runs() -> None:
    clock, lines, run = HandClock(), list[str](), cast(RunControl, Run())
    with shown_rounds(LineProgress(clock=clock, write=lines.append), clock=clock) as on_round:
        on_round(run)
        assert not lines, "too soon"
        clock.sleep(10.0)
        on_round(run)
    fields = "loss 0.5 · workers 4 · spares 1 · servers 2 · deaths 2 · seconds lost 3.2"
    told = "training: 3 of 9 rounds (33%)"
    assert lines == [f"{told} · 0.3 rounds/s · 20 s left · {fields}", f"{told} · in 10 s · 0.3 rounds/s · {fields}"]


def test_without_tensorboard_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    script = tmp_path / "script.py"
    script.write_text("import torch\nmodel_fn = loss_fn = print\ndataset = (torch.zeros(1, 1), torch.zeros(1, 1))\n")
    result = CliRunner().invoke(app, ["server", "train", str(script), "--tensorboard", str(tmp_path / "board")])
    assert result.exit_code != 0
    assert "pip install 'tatami-torch[tensorboard]'" in result.stderr
