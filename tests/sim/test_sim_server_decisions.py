"""One failure on the real server runtime and in the simulator: the same actions of the coordinator, in the same order.

In lockstep the actions follow from what is told, not from when, with one exception: whether the spare that stands by is up when
a worker dies. So the worker waits with its death until it is. Nothing is put into another order, and nothing is left out.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from sim_rig import actions_of
from torch import nn

pytest.importorskip("ray")

from tatami.engine.crew import Pool
from tatami.engine.ray_engine import engine
from tatami.server import RunContext, RunSettings, TaskPhase, train
from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.coordinator import Coordinator
from tatami.server.recovery import AbstractRecovery, Checkpoint, FromServers, Ignore
from tatami.sim.platforms import RDMA, MachineGroup, Tree, Wire
from tatami.sim.server import ServerSetup

WORKERS, SERVERS, ROUNDS = 3, 2, 5
DIES, IN_ROUND = 1, 2
SPARE = WORKERS
PULL_S = 2e-3 + 10.0
WORK_S = 100.0
PUSH_S = 2e-3 + 20.0
"""To both servers, each of which has everything: 2 GB."""
INTO_S = {TaskPhase.PULL: 5.0, TaskPhase.COMPUTE: PULL_S + 30.0, TaskPhase.BETWEEN_SHARDS: PULL_S + WORK_S + 10.0}
"""When the simulated worker dies, after the beginning of the round."""
_PATIENCE_S = 800.0


@dataclass(frozen=True, kw_only=True)
class DiesOnceSpareIsUp:
    """Kills worker 1's first process at a phase of round 2, when `spare_is_up` exists."""

    phase: TaskPhase
    spare_is_up: Path

    def __call__(self, phase: TaskPhase, process: int, round_: int) -> None:
        if (phase, process, round_) != (self.phase, DIES, IN_ROUND):
            return
        limit_s = time.monotonic() + _PATIENCE_S
        while not self.spare_is_up.exists():
            if time.monotonic() > limit_s:
                raise TimeoutError(f"the spare was not up after {_PATIENCE_S:.0f} s")
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One Ray, and processes that go from run to run."""
    with engine(store_bytes=200 * 2**20):
        yield Pool()


def really(
    recovery: AbstractRecovery, phase: TaskPhase, *, pool: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[act.Action]:
    """What the coordinator of a real run orders."""
    actions: list[act.Action] = []
    spare_is_up = folder / "spare-is-up"
    handle = Coordinator.handle

    def record(coordinator: Coordinator, event: ev.Event) -> tuple[act.Action, ...]:
        ordered = handle(coordinator, event)
        actions.extend(ordered)
        if isinstance(event, ev.SpareReady) and event.process == SPARE:
            spare_is_up.touch()
        return ordered

    monkeypatch.setattr(Coordinator, "handle", record)
    train(
        lambda: nn.Linear(3, 2),
        nn.MSELoss(),
        dataset=(torch.ones(30, 3), torch.ones(30, 2)),
        directory=folder,
        settings=RunSettings(
            rounds=ROUNDS,
            workers=WORKERS,
            servers=SERVERS,
            replicas=SERVERS,
            spares=1,
            batch_size=30,
            recovery=recovery,
            heartbeat_s=_PATIENCE_S,
        ),
        context=RunContext(on_phase=DiesOnceSpareIsUp(phase=phase, spare_is_up=spare_is_up), pool=pool),
    )
    return list(actions)  # the simulated coordinator is recorded as well


def simulated(recovery: AbstractRecovery, phase: TaskPhase) -> list[act.Action]:
    """What the coordinator of the same run orders on simulated machines."""
    worker = Wire(bandwidth_bytes_per_s=100e6, latency_s=1e-3, duplex=True)
    server = Wire(bandwidth_bytes_per_s=100e9, latency_s=1e-3, duplex=True)
    groups = (
        MachineGroup(name="worker{i}", count=WORKERS, link=worker),
        MachineGroup(name="server{i}", count=SERVERS, link=server),
    )
    setup = ServerSetup(
        platform=Tree(name="star", groups=groups, fabric=RDMA),
        workers=tuple(range(WORKERS)),
        servers=tuple(range(WORKERS, WORKERS + SERVERS)),
        rounds=ROUNDS,
        recovery=recovery,
        replicas=SERVERS,
        spares=1,
        mtbf_s=None,
    )
    at_s = IN_ROUND * (PULL_S + WORK_S + PUSH_S) + INTO_S[phase]
    return actions_of(replace(setup, deaths=((at_s, DIES),)))


@pytest.mark.parametrize(
    ("recovery", "phase"),
    [
        *((recovery, TaskPhase.COMPUTE) for recovery in (FromServers(), Ignore(), Checkpoint(every=2))),
        (FromServers(), TaskPhase.PULL),
        (Ignore(), TaskPhase.BETWEEN_SHARDS),
    ],
    ids=lambda value: value.name.lower(),
)
def test_the_decisions_are_those_of_a_real_run(
    recovery: AbstractRecovery, phase: TaskPhase, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = really(recovery, phase, pool=pool, folder=tmp_path, monkeypatch=monkeypatch)
    rehearsed = simulated(recovery, phase)
    assert rehearsed == real
    taken_over = [each for each in rehearsed if isinstance(each, act.SendTask) and each.process == SPARE]
    assert {each.worker for each in taken_over} == {DIES}
    assert [isinstance(each, act.ReadCheckpoint) for each in rehearsed].count(True) == (recovery.name == "checkpoint")
    applied = {each.version: len(each.contributions) for each in rehearsed if isinstance(each, act.ApplyShard)}
    assert list(applied.values()) == [WORKERS - (recovery.name == "ignore" and version == IN_ROUND + 1) for version in applied]
    assert isinstance(rehearsed[-1], act.Finish)
