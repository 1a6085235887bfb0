"""`tatami run`: a script on real ranks, its exit code, and what goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cluster.device_choice import DEVICE_VARIABLE
from tatami.comm import launch
from tatami.elastic import launch as elastic_launch

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
    assert seen == [(["-m", "package"], {"ranks": 5, "hosts": ["a:3", "b:2"]})]


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
