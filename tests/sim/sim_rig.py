"""What the tests of the rehearsal share: processes to simulate in, and bodies that can be sent there by name."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

from tatami.server.actions import Action
from tatami.sim.platforms import AbstractPlatform, ClusterPlatform
from tatami.sim.processes import Runs
from tatami.sim.server import ServerSetup
from tatami.sim.server.play import ServerPlay
from tatami.sim.stage import Stage, play

Job = TypeVar("Job")
Result = TypeVar("Result")


@cache
def started() -> Runs:
    """Two children for all tests: SimGrid is loaded once in each."""
    runs = Runs(cores=2)
    atexit.register(runs.close)
    return runs


def call(function: Callable[[Job], Result], job: Job) -> Result:
    return started().call(function, job, timeout_s=800)


@dataclass(frozen=True, kw_only=True)
class LeftToSimGrid(ClusterPlatform):
    """The same machines; also what shares no link is an activity of SimGrid."""

    def unshared(self, source: int, target: int) -> None:  # noqa: ARG002
        return None


@dataclass(frozen=True, kw_only=True)
class PlayedByEvents(ClusterPlatform):
    """The same machines; each message of an iteration is an event."""

    @property
    def only_link(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Things that all begin at 0: (source, target, bytes), (host, flop), and seconds; `meet_few` as of `Stage`."""

    platform: AbstractPlatform
    sends: tuple[tuple[int, int, float], ...] = ()
    computes: tuple[tuple[int, float], ...] = ()
    waits: tuple[float, ...] = ()
    meet_few: bool = False


@dataclass
class Ends:
    """When each of them ended, in the order in which they did."""

    log: list[tuple[str, int, float]] = field(default_factory=list)
    bytes_moved: float = 0.0

    @property
    def times(self) -> dict[tuple[str, int], float]:
        return {(what, index): at_s for what, index, at_s in self.log}


def ends(transfers: Transfers) -> Ends:
    """Run them in this process, which must be one of `Runs`."""
    found = Ends()

    def act(stage: Stage) -> Callable[[], Ends]:
        def noted(what: str, index: int) -> Callable[[], None]:
            return lambda: found.log.append((what, index, stage.now_s))

        for index, (source, target, size_bytes) in enumerate(transfers.sends):
            stage.send(source, target, size_bytes=size_bytes, then=noted("send", index))
        for index, (host, work_flop) in enumerate(transfers.computes):
            stage.compute(host, work_flop=work_flop, then=noted("compute", index))
        for index, wait_s in enumerate(transfers.waits):
            stage.after(wait_s, noted("wait", index))

        def finish() -> Ends:
            found.bytes_moved = stage.bytes_moved
            return found

        return finish

    return play(transfers.platform, act, meet_few=transfers.meet_few)


def actions_of(setup: ServerSetup) -> list[Action]:
    """All that the coordinator of a run orders, no round passed over; in this process, which must be one of `Runs`."""

    def act(stage: Stage) -> Callable[[], list[Action]]:
        actions: list[Action] = []
        run = ServerPlay(setup, stage, seed=0, period=None, skips=False, watch=actions.append)
        run.begin()
        return lambda: actions

    return play(setup.platform, act)
