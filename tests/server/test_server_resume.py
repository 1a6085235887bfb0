"""The driver itself dies, or is interrupted: what goes on from its checkpoints, and what it leaves behind."""

import os
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

from tatami.errors import CheckpointError, InputError
from tatami.server import SGD, Adam, Checkpoint, Ignore, RunReport, RunSettings, resume

# One file for the process that dies and for the one that goes on.
SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from tatami import server
from dataclasses import replace

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :2])

def model_fn():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

def loss_fn(output, target):
    return ((output - target) ** 2).mean()

def flat(model):
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])

def strike(how):
    def on_round(run):
        if run.version == 4:
            print("pids", *run.pids().values(), flush=True)
            os.kill(os.getpid(), how)
    return on_round

def main():
    how, directory, report = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" hands it down ignored
    settings = server.RunSettings(
        rounds=9, workers=2, servers=2, spares=0, batch_size=30, optimizer=server.Adam(lr=0.01), heartbeat_s=30.0
    )
    with server.engine(store_bytes=100 * 2**20):
        pool = server.Pool()
        if how == "SIGKILL":
            model, _ = server.train(model_fn, loss_fn, dataset=(X, Y), settings=settings, context=server.RunContext(pool=pool))
            torch.save(flat(model), directory + ".undisturbed")
        on_round = strike(getattr(signal, how))
        context = server.RunContext(report=report, pool=pool, on_round=on_round)
        settings = replace(settings, save_every=1)
        try:
            server.train(model_fn, loss_fn, dataset=(X, Y), directory=directory, settings=settings, context=context)
        except KeyboardInterrupt:
            print("interrupted", flush=True)

if __name__ == "__main__":
    main()
"""


def strike(how: str, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """Run the script until it hits itself; what it said, and the processes it had."""
    script = tmp_path / "dies.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), how, str(tmp_path / "run"), str(tmp_path / "report.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False)
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("pids")] or [done.stderr]
    return done, [int(word) for word in said.split()[1:]]


def wait_until_gone(pids: list[int]) -> None:
    """Ends by the test's own timeout if they stay."""
    for pid in pids:
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.sched_yield()


def test_a_driver_that_is_killed_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    done, pids = strike("SIGKILL", tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(pids) == 4
    wait_until_gone(pids)
    names = runpy.run_path(str(tmp_path / "dies.py"), run_name="resumed")
    undisturbed = torch.load(tmp_path / "run.undisturbed", weights_only=True)
    model, report = resume(
        tmp_path / "run", model_fn=names["model_fn"], loss_fn=names["loss_fn"], dataset=(names["X"], names["Y"])
    )
    assert report.start in (3, 4), "the round that was applied last is on disk, or just not yet"
    assert report.rounds == 9
    assert torch.equal(torch.cat([each.detach().reshape(-1) for each in model.parameters()]), undisturbed)


def test_an_interrupt_leaves_a_report_and_nothing_else(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    done, pids = strike("SIGINT", tmp_path)
    assert done.stdout.splitlines()[-1] == "interrupted", done.stderr
    assert done.returncode == 0
    assert len(pids) == 4
    wait_until_gone(pids)
    assert RunReport.load(tmp_path / "report.json").rounds == 4
    left = [name for name in set(os.listdir("/dev/shm")) - before if "plasma" in name or "ray" in name.lower()]
    assert not [name for name in left if not _is_of_a_living_process(name)]


def _is_of_a_living_process(name: str) -> bool:
    """Other tests may run beside this one; a store that is mapped belongs to somebody."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if name in maps.read_text():
                return True
        except OSError:
            continue
    return False


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    settings = RunSettings(
        rounds=5,
        optimizer=Adam(lr=0.5, betas=(0.8, 0.9)),
        recovery=Checkpoint(every="daly", directory=tmp_path),
        speeds=(1.0, 2.0, 3.0, 4.0),
        script="train.py",
    )
    settings.write(tmp_path)
    again = RunSettings.read(tmp_path)
    assert again.recovery == Checkpoint(every="daly", directory=str(tmp_path))
    assert (again.optimizer, again.speeds, again.consistency) == (settings.optimizer, settings.speeds, settings.consistency)
    RunSettings(rounds=1, optimizer=SGD(lr=1.0, momentum=0.5), recovery=Ignore()).write(tmp_path)
    assert RunSettings.read(tmp_path).optimizer == SGD(lr=1.0, momentum=0.5)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "there is no run.json in it"), ("{", "damaged"), ('{"recovery": {"kind": "os"}}', "damaged")]
)
def test_nothing_to_go_on_from(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        resume(tmp_path, model_fn=lambda: torch.nn.Linear(1, 1), loss_fn=torch.nn.MSELoss(), dataset=(torch.ones(1, 1),) * 2)


def test_a_run_that_saved_nothing_yet_cannot_be_resumed(tmp_path: Path) -> None:
    RunSettings(rounds=1, workers=1, servers=1).write(tmp_path)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        resume(tmp_path, model_fn=lambda: torch.nn.Linear(1, 1), loss_fn=torch.nn.MSELoss(), dataset=(torch.ones(1, 1),) * 2)
    with pytest.raises(InputError, match="workers must be at least 1"):
        resume(
            tmp_path,
            model_fn=lambda: torch.nn.Linear(1, 1),
            loss_fn=torch.nn.MSELoss(),
            dataset=(torch.ones(1, 1),) * 2,
            settings=replace(RunSettings.read(tmp_path), workers=0),
        )
