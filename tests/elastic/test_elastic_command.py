"""`tatami run --elastic` as a user sees it where a run does not go as it should: what is said, and what is written."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from tatami.engine.processes import children

HEAD = """
import os, signal, sys, torch, tatami
from torch import nn

comm = tatami.init()
model = None
"""
TRAINS = """
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
model = tatami.tile(network, comm, batch_size=8, speeds="equal", reduction="mean")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in tatami.steps(model, optimizer, count=3):
    with step:
        x = model.local(torch.ones(8, 4))
        loss = model(x).square().mean()
        MIDDLE
        loss.backward()
        step.update(loss)
print(comm.size, "ranks have trained")
"""
DIES_ONCE = """
if comm.rank == 1 and not os.path.exists("dead"):
    open("dead", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def elastic_run(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "tatami", "run", "--elastic", "-n", "2", "--report", "report.json", *options, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800, check=False)


def test_a_rank_that_dies_before_the_loop_is_told_of_and_the_script_may_end_by_exit(tmp_path: Path) -> None:
    chdir = f"os.chdir({str(tmp_path)!r})\n"
    done = elastic_run(tmp_path, HEAD + chdir + DIES_ONCE + TRAINS.replace("MIDDLE", "pass") + "sys.exit(0)\n")
    assert done.returncode == 0, done.stderr
    assert "p1 died, the run begins: step 0 begins, 1 rank goes on" in done.stderr
    assert re.search(r"tatami run: p0 is process \d+ on \S", done.stderr)
    assert "p0: 1 ranks have trained" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [change["reason"] for change in report["changes"]] == ["p1 died, the run begins"]
    assert report["first_members"] == ["p0"]


@pytest.mark.parametrize("moment", ["while Ray starts", "in a step"])
def test_sigterm_ends_a_run_with_a_sentence_and_143_and_leaves_nothing(tmp_path: Path, moment: str) -> None:
    (tmp_path / "script.py").write_text(
        HEAD + TRAINS.replace("count=3", "count=10**6").replace("MIDDLE", "print('in a step', flush=True)")
    )
    command = [sys.executable, "-m", "tatami", "run", "--elastic", "-n", "2", "--report", "report.json", "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if moment == "in a step":
                assert any(line.endswith("in a step\n") for line in iter(process.stdout.readline, ""))
            else:
                # One child may be of an import that looks for a library, before signals are handled.
                while len(starting := children(process.pid)) < 2 and process.poll() is None:
                    time.sleep(0.01)
                assert len(starting) > 1
            process.terminate()
            _, said = process.communicate(timeout=800)
        finally:
            process.kill()
    assert process.returncode == 143, said
    assert said.splitlines()[-1] == "tatami run: ended by SIGTERM; all ranks are stopped"
    assert "Fatal" not in said
    assert "stack trace" not in said.lower()
    assert (tmp_path / "report.json").exists() == (moment == "in a step")
    owners = [json.loads(path.read_text()) for path in Path("/tmp").glob("tatami-*/owner.json")]
    assert process.pid not in [owner["pid"] for owner in owners]


def test_an_error_names_rank_and_step_and_the_report_is_written(tmp_path: Path) -> None:
    fails = "if comm.rank == 1 and step.number == 1: raise ValueError('one rank fails')"
    done = elastic_run(tmp_path, HEAD + TRAINS.replace("MIDDLE", fails))
    assert done.returncode == 1
    assert "the script failed on p1, at step 1: ValueError: one rank fails" in " ".join(done.stderr.split())
    assert "runpy" not in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["changes"] == []


def test_files_are_overwritten_by_force_also_where_a_rank_ends_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name in ("report.json", "run.png"):
        (tmp_path / name).write_text("old")
    ends = "if comm.rank == 1 and step.number == 1: sys.exit(0)"
    done = elastic_run(tmp_path, HEAD + TRAINS.replace("MIDDLE", ends), "--plot", "run.png", "--force")
    assert done.returncode == 1
    assert "the script ended on p1, at step 1, with exit code 0; a rank leaves by loop.leave()" in " ".join(done.stderr.split())
    assert json.loads((tmp_path / "report.json").read_text())["first_members"] == ["p0", "p1"]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    done = elastic_run(tmp_path, "raise ValueError('before the loop')", "--plot", "run.png", "--force")
    assert "the script failed on p" in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["first_members"] == []
