"""`tatami run`: a script on real ranks, its exit code, and what goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cli.demo import why_slower
from tatami.cli.training import TrainingOutcome, course
from tatami.cluster.device_choice import DEVICE_VARIABLE
from tatami.comm import launch
from tatami.elastic import launch as elastic_launch
from tatami.retiling import Decision, DecisionKind
from tatami.tiling import Layout, Span, Tile, Tiling
from tatami.train import Check, History

SCRIPT = """
import sys
import torch
import tatami

comm = tatami.init()
total = torch.tensor([float(comm.rank + 1)])
comm.allreduce(total)
if comm.rank == 0:
    print(comm.size, total.item(), sys.argv[1:])
"""


def tatami_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mpi4py")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tatami", "run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800, check=False)


def test_the_script_gets_its_ranks_and_its_own_options(tmp_path: Path) -> None:
    done = tatami_run(tmp_path, "-n", "2", "--json", "script.py", "--epochs", "3", "-n", "7")
    assert done.returncode == 0, done.stderr
    said, record = done.stdout.splitlines()
    assert said == "2 3.0 ['--epochs', '3', '-n', '7']"
    assert json.loads(record)["ranks"] == 2
    assert json.loads(record)["exit_code"] == 0


def test_a_script_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "nowhere.py"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: there is no script 'nowhere.py'")


def test_ranks_hosts_and_exit_code_are_handed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(command: list[str], **named: object) -> int:
        seen.append((command, named))
        return 7

    monkeypatch.setattr(launch, "run", run)
    result = CliRunner().invoke(app, ["run", "-n", "5", "--hosts", "a:3,b:2", "-m", "package"])
    assert result.exit_code == 7
    assert seen == [(["-m", "package"], {"ranks": 5, "hosts": ["a:3", "b:2"], "copies": False})]


def test_a_device_is_asked_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    told: list[str] = []

    def run(*_: object, **__: object) -> int:
        told.append(os.environ[DEVICE_VARIABLE])
        return 0

    monkeypatch.setattr(launch, "run", run)
    assert CliRunner().invoke(app, ["run", "--device", "auto", "script.py"]).exit_code == 0
    assert told == ["auto"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "gpu"], "--device 'gpu': choose one of: auto, cpu, cuda"),
        (["--device", "auto", "--elastic"], "--device: an elastic run computes on CPUs"),
    ],
)
def test_a_device_that_cannot_be_had_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments, "script.py"])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--elastic", "--plot", "run.bmp"], "a picture is written as .png, .pdf, .svg, not as '.bmp'"),
        (["--elastic", "--plot", "nowhere/run.png"], "there is no folder nowhere. Make it first"),
        (["--elastic", "--plot", "there.png"], "there.png"),
        (["--elastic", "--report", "there.png"], "there.png"),
        (["--elastic", "--report", "new.png", "--plot", "./new.png"], "--report and --plot both name new.png"),
        (["--plot", "run.png"], "--plot is for elastic runs: add --elastic, or leave it out"),
        (["--report", "run.json"], "--report is for elastic runs: add --elastic, or leave it out"),
        (["--force"], "--force is for the files of elastic runs: add --elastic, or leave it out"),
        (["--heartbeat", "5"], "--heartbeat is for elastic runs: add --elastic, or leave it out"),
        (["--elastic", "--heartbeat", "0"], "heartbeat_s must be more than 0 seconds, not 0.0"),
    ],
)
def test_where_no_picture_or_report_can_be_written_nothing_is_started(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.png").write_text("kept")
    (tmp_path / "script.py").write_text(SCRIPT)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "run", refuse)
    monkeypatch.setattr(elastic_launch, "run_elastic", refuse)
    result = CliRunner().invoke(app, ["run", *arguments, "script.py"])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert (tmp_path / "there.png").read_text() == "kept"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("words", [["run", "x.py"], ["train"], ["probe"]])
def test_a_card_is_refused_where_there_is_none(words: list[str]) -> None:
    command, *script = words
    result = CliRunner().invoke(app, [command, "--device", "cuda", *script])
    assert result.exit_code == 2
    assert "torch finds no CUDA device on this host" in " ".join(result.stderr.split())


TILING = Tiling(samples=4, units=4, tiles=(Tile(processor="p0", replica=0, samples=Span(0, 4), units=Span(0, 4)),))


def test_three_ways_to_one_loss(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, "-m", "tatami", "demo", "--speeds", "1,0.5", "--net", "64-200-10", "--iterations", "40", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [record["method"] for record in records] == ["even", "srpm", "drpm"]
    even, srpm, drpm = records
    for record in records:  # an efficiency that cannot be is told as such, and is no figure
        assert record["efficiency"] is None or 0 < record["efficiency"] <= 1.02
        assert record["efficiency"] is not None or "cannot be" in record["efficiency_problem"]
    assert srpm["loss"] == pytest.approx(even["loss"], rel=1e-4)
    assert drpm["loss"] == pytest.approx(even["loss"], rel=1e-4)
    assert even["accuracy"]["digit"] > 0.5
    assert srpm["speeds"] == {"p0": 1.0, "p1": 0.5}
    assert [check["iteration"] for check in drpm["checks"]] == [20, 40]
    assert all(record["is_machine_busy"] in (True, False) for record in records)
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["course.png", "tiling.png"]


def test_the_course_of_a_run_is_cut_at_its_checks_or_into_equal_parts() -> None:
    history = History(losses=[1.0] * 25, iteration_s=[9.0, *[1.0] * 9, *[2.0] * 10, *[3.0] * 5])
    points = course(history, every=10)
    assert [(p.iteration, p.iteration_s, p.remapping) for p in points] == [(10, 1.0, None), (20, 2.0, None), (25, 3.0, None)]
    history = History(losses=[1.0] * 30, iteration_s=[9.0] * 10 + [2.0] * 10 + [1.0] * 10, checks=[check(20, moves=True)])
    points = course(history, every=10)
    assert [(p.iteration, p.iteration_s, p.remapping) for p in points] == [(10, 9.0, None), (20, 2.0, "whole"), (30, 1.0, None)]


def check(iteration: int, *, moves: bool) -> Check:
    kind = DecisionKind.WHOLE if moves else DecisionKind.KEEP
    decision = Decision(
        kind=kind, iteration=iteration, layout=cast(Layout, None), speeds={"p0": 1.0, "p1": 0.5},
        ratio=None, predicted=1.0, reason="even enough",
    )  # fmt: skip
    return Check(decision=decision, compute_s={"p0": 1.0, "p1": 2.0}, moved=None)


def outcome(iteration_s: float, *, checks: list[Check], speeds: dict[str, float]) -> TrainingOutcome:
    return TrainingOutcome(
        history=History(losses=[1.0], iteration_s=[iteration_s], checks=checks),
        loss=1.0,
        accuracy={},
        tiling=TILING,
        speeds=speeds,
        iteration_s=iteration_s,
        batch_size=4,
    )


def test_drpm_that_is_slower_than_equal_tiles_is_explained() -> None:
    told = {"p0": 1.0, "p1": 0.5}
    even = outcome(1.0, checks=[], speeds=told)

    def why(iteration_s: float, *, checks: list[Check], speeds: dict[str, float], is_busy: bool = False) -> str:
        return why_slower(outcome(iteration_s, checks=checks, speeds=speeds), even, given=told, is_busy=is_busy) or ""

    assert why(0.9, checks=[], speeds=told) == ""
    assert "DRPM is 1.50 times as slow as equal tiles here: it never moved a tile (there were too few" in why(
        1.5, checks=[], speeds=told
    )
    assert "(even enough)" in why(1.5, checks=[check(20, moves=False)], speeds=told)
    moved = [check(20, moves=True), check(40, moves=False)]
    wrong = {"p0": 1.0, "p1": 1.0}
    assert "it estimated p1 at 2.00 times its relative speed, probably because the iterations were too short" in why(
        1.5, checks=moved, speeds=wrong
    )
    assert "other programs" in why(1.5, checks=moved, speeds=wrong, is_busy=True)
    assert "last moved tiles after iteration 20" in why(1.5, checks=moved, speeds=told)
