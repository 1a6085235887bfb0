"""Ray's own processes are killed and stopped: the run ends with a word and a report, and goes on from its checkpoint.

`make chaos` asks for further blows at random moments (TATAMI_CHAOS_RAYLET_RUNS).
"""

import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

import ray
from train_rig import flat, loss_fn, model_fn, train_with

from hand_clock import HandClock
from tatami.engine import ray_watch as watching
from tatami.engine.ray_engine import engine
from tatami.engine.ray_watch import Condition, Judge, RayProcess, RayWatch, ray_processes
from tatami.errors import TrainingError
from tatami.server import Adam, Pool, RunContext, RunControl, RunReport, RunSettings, resume, train

RUNS = int(os.environ.get("TATAMI_CHAOS_RAYLET_RUNS", "0"))
FIRST_SEED = int(os.environ.get("TATAMI_CHAOS_SEED", "0"))
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :2])

RAYLET = RayProcess(name="raylet", pid=7, is_ours=True)
GCS = RayProcess(name="GCS", pid=8, is_ours=True)


def look(judge: Judge, *, now_s: float, raylet: Condition = Condition.RUNS, waits_for_s: float = 0.0) -> str | None:
    conditions = {RAYLET.pid: raylet, GCS.pid: Condition.RUNS}
    judge.look(conditions, waits_for_s=waits_for_s, waits_in="Crew.start", now_s=now_s)
    return judge.fault


def test_a_process_that_is_gone_is_blamed_at_once_and_for_good() -> None:
    judge = Judge([RAYLET, GCS])
    assert look(judge, now_s=1.0) is None
    fault = look(judge, now_s=1.1, raylet=Condition.GONE)
    assert fault is not None
    assert "Ray's raylet (process 7), through which this process reaches workers and servers, is gone" in fault
    assert look(judge, now_s=99.0, waits_for_s=1e9) == fault, "what came first is the cause"


def test_a_process_may_be_stopped_for_a_while() -> None:
    judge = Judge([RAYLET, GCS])
    for now_s in range(100):
        how = Condition.STOPPED if now_s % 10 else Condition.RUNS
        assert look(judge, now_s=float(now_s), raylet=how) is None
    assert look(judge, now_s=99.9, raylet=Condition.STOPPED) is None
    fault = look(judge, now_s=100.1, raylet=Condition.STOPPED)
    assert fault is not None
    assert "has been stopped for 10 s, as by `kill -STOP 7`" in fault


def test_a_wait_that_does_not_end_says_who_waits_for_whom() -> None:
    judge = Judge([RAYLET, GCS])
    assert look(judge, now_s=500.0, waits_for_s=299.0) is None
    fault = look(judge, now_s=501.0, waits_for_s=301.0)
    assert fault == "this process has waited 301 s for Ray's raylet (process 7) and GCS (process 8), in Crew.start"


def test_where_nothing_helps_the_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped raylet of somebody else's is not killed; the call that waits for it would never end."""
    monkeypatch.setattr(watching, "STOPPED_S", 2.0)
    monkeypatch.setattr(watching, "_GRACE_S", 1.0)
    stopped = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    os.kill(stopped.pid, signal.SIGSTOP)
    told: list[str] = []
    left = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    process = RayProcess(name="raylet", pid=stopped.pid, is_ours=False)
    try:
        while process.condition is not Condition.STOPPED:
            os.sched_yield()
        with RayWatch([process], clock=HandClock(0.0, step_s=0.4), tell=told.append, leave=leave):
            assert left.wait(timeout=800)
        assert process.condition is Condition.STOPPED
    finally:
        stopped.kill()
        stopped.wait()
    assert set(codes) == {1}
    assert len(told) == 1
    assert re.search(rf"raylet \(process {stopped.pid}\).* stopped for \d s.*; it was waited for in ", told[0])


def test_what_is_not_rays_may_take_as_long_as_it_likes() -> None:
    told: list[str] = []
    clock = HandClock(0.0, step_s=0.4)
    with RayWatch([], clock=clock, tell=told.append, leave=lambda _: None) as watch, watch.elsewhere():
        limit = threading.Event()
        while clock.time_s < 10 * watching.WAIT_S:
            clock.time_s += 100.0
            limit.wait(0.001)
    assert told == []
    assert watch.fault is None


# -- real runs ----------------------------------------------------------------------------------------------------------


SETTINGS: dict[str, Any] = {
    "dataset": (X, Y),
    "rounds": 10**6,
    "workers": 1,
    "servers": 1,
    "spares": 0,
    "batch_size": 30,
    "optimizer": Adam(lr=0.01),
    "heartbeat_s": 60.0,
}


def test_a_run_without_its_raylet_ends_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one process, one after the other: that the first has lost its Ray does not concern the second."""
    monkeypatch.setattr(watching, "STOPPED_S", 1.0)
    for how, what in ((signal.SIGKILL, "is gone: it was killed, or has crashed"), (signal.SIGSTOP, "has been stopped for")):
        raylets: list[int] = []

        def strike(run: RunControl) -> None:
            if run.version == 3:
                raylets.extend(process.pid for process in ray_processes(ray) if process.name == "raylet")  # noqa: B023
                os.kill(raylets[0], how)  # noqa: B023

        directory, report = tmp_path / how.name, tmp_path / f"{how.name}.json"
        with pytest.raises(TrainingError) as caught:
            train_with(model_fn, loss_fn, **SETTINGS, directory=directory, save_every=1, report=report, on_round=strike)
        said = str(caught.value)
        assert f"Ray's raylet (process {raylets[0]}), through which this process reaches workers and servers, {what}" in said
        assert f"What happened is in {report}." in said
        assert f"`tatami server resume {directory}`" in said
        (rounds,) = (int(number) for number in re.findall(r"the run stopped after (\d+) rounds", said))
        (version,) = (int(number) for number in re.findall(r"The state of version (\d+) is saved", said))
        assert rounds - version in (0, 1), "the round that was applied last is on disk, or just not yet"
        assert RunReport.load(report).rounds == rounds
        assert not ray.is_initialized()


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One blow.

    Attributes:
        who: which of Ray's processes.
        version: it is dealt after this commit.
        delay_s: so long after it; None: just before the run's own thread calls Ray.
        width: of the network. Wide ones are too large for messages, and go through the raylet's store.
    """

    how: signal.Signals
    who: str = "raylet"
    version: int = 3
    delay_s: float | None = None
    width: int = 8


INSIDE = Blow(how=signal.SIGSTOP)


def drawn(seed: int) -> Blow:
    chance = random.Random(f"raylet {seed}")
    return Blow(
        how=chance.choice((signal.SIGKILL, signal.SIGSTOP)),
        who=chance.choice(("raylet", "raylet", "GCS")),
        version=chance.randrange(1, 6),
        delay_s=chance.choice((0.0, chance.uniform(0, 0.3))),
        width=chance.choice((8, 200_000)),
    )


SCRIPT = """
import os, signal, sys, threading
import torch
from torch import nn
from tatami import server
from tatami.engine import ray_watch
from tatami.server.storage import Storage

def model_fn():
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))

def loss_fn(output, target):
    return ((output - target) ** 2).mean()

WIDTH = int(os.environ.get("WIDTH", "8"))
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
DATASET = (X, torch.sin(X[:, :2]))
SETTINGS = dict(
    workers=2, servers=1, spares=0, batch_size=30, heartbeat_s=60.0,
    optimizer=server.SGD(lr=0.8 / WIDTH),
)

def main():
    import ray
    how, who, version, delay_s, folder = sys.argv[1:]
    ray_watch.STOPPED_S = ray_watch._GRACE_S = 1.0

    def strike():
        (process,) = [each for each in ray_watch.ray_processes(ray) if each.name == who]
        os.kill(process.pid, getattr(signal, how))

    def write_after_the_blow(self, order):
        if order.version == int(version):
            strike()
            ray.put(b"x" * 10**7)
        write(self, order)

    def on_round(run):
        if run.version == int(version) and delay_s != "None":
            threading.Timer(float(delay_s), strike).start()

    write = Storage.write
    if delay_s == "None":
        Storage.write = write_after_the_blow
    server.train(
        model_fn, loss_fn, dataset=DATASET, directory=folder + "/run",
        settings=server.RunSettings(rounds=10**6, save_every=1, **SETTINGS),
        context=server.RunContext(report=folder + "/report.json", on_round=on_round),
    )

if __name__ == "__main__":
    from tatami.errors import TrainingError
    try:
        main()
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
"""


def strike_in_another_process(blow: Blow, folder: Path) -> str:
    """What the run says at its end, on one line."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), blow.how.name, blow.who, str(blow.version), str(blow.delay_s), str(folder)],
        env=os.environ | {"WIDTH": str(blow.width)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(said)) == (1, 1), done.stderr
    return said[0]


@pytest.mark.parametrize("blow", [INSIDE, *(drawn(seed) for seed in range(FIRST_SEED, FIRST_SEED + RUNS))], ids=str)
def test_whatever_is_hit_and_when_the_run_ends_with_a_word_and_is_gone_on_with(
    blow: Blow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = strike_in_another_process(blow, tmp_path)
    assert f"What happened is in {tmp_path / 'report.json'}." in said
    assert f"is saved in {tmp_path / 'run'}: `tatami server resume {tmp_path / 'run'}`" in said
    if blow is INSIDE:
        assert "the run stopped after 2 rounds: Ray's raylet (process " in said
        assert re.search(r"has been stopped for \d+ s, as by `kill -STOP \d+`; it was waited for in Runtime._carry_out\.", said)
    (version,) = (int(number) for number in re.findall(r"The state of version (\d+) is saved", said))
    assert RunReport.load(tmp_path / "report.json").rounds - version in (-1, 0, 1)
    monkeypatch.setenv("WIDTH", str(blow.width))
    names = runpy.run_path(str(tmp_path / "script.py"), run_name="resumed")
    task = {"model_fn": names["model_fn"], "loss_fn": names["loss_fn"], "dataset": names["DATASET"]}
    settings = RunSettings(rounds=version + 2, **names["SETTINGS"])
    with engine(store_bytes=200 * 2**20):
        context = RunContext(pool=Pool())
        model, _ = resume(tmp_path / "run", **task, settings=settings, context=context)
        plain, _ = train(**task, settings=settings, context=context)
    assert torch.equal(flat(model), flat(plain))
