"""What the tests of the rehearsal share: processes to simulate in, and bodies that can be sent there by name."""

import atexit
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from tatami.server.actions import Action
from tatami.sim.platforms import AbstractPlatform
from tatami.sim.processes import Runs
from tatami.sim.server import ServerSetup
from tatami.sim.server.stage_actions import ServerPlay
from tatami.sim.stage import Stage, play


@cache
def started() -> Runs:
    """Two processes for all tests."""
    runs = Runs(cores=2)
    atexit.register(runs.close)
    return runs


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Things that all begin at 0: (source, target, bytes), and seconds."""

    platform: AbstractPlatform
    sends: tuple[tuple[int, int, float], ...] = ()
    waits: tuple[float, ...] = ()


@dataclass
class Ends:
    """When each of them ended, in the order in which they did."""

    log: list[tuple[str, int, float]] = field(default_factory=list)
    bytes_moved: float = 0.0

    @property
    def times(self) -> dict[tuple[str, int], float]:
        return {(what, index): at_s for what, index, at_s in self.log}


def ends(transfers: Transfers) -> Ends:
    """Run them."""
    found = Ends()

    def act(stage: Stage) -> Callable[[], Ends]:
        def noted(what: str, index: int) -> Callable[[], None]:
            return lambda: found.log.append((what, index, stage.now_s))

        for index, (source, target, size_bytes) in enumerate(transfers.sends):
            stage.send(source, target, size_bytes=size_bytes, then=noted("send", index))
        for index, wait_s in enumerate(transfers.waits):
            stage.after(wait_s, noted("wait", index))

        def finish() -> Ends:
            found.bytes_moved = stage.bytes_moved
            return found

        return finish

    return play(transfers.platform, act)


def actions_of(setup: ServerSetup) -> list[Action]:
    """All that the coordinator of a run orders, no round passed over;"""

    def act(stage: Stage) -> Callable[[], list[Action]]:
        actions: list[Action] = []
        run = ServerPlay(setup, stage, seed=0, period=None, skips=False, watch=actions.append)
        run.begin()
        return lambda: actions

    return play(setup.platform, act)
