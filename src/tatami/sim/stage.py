"""Machines and links of a platform, and what goes on there: transfers and timers, each with what is to be done when it ends.

Time goes from one end of something to the next. Of what ends at the same time, what was started first is handled first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tatami.sim.flows import Flow, Flows, LinkPaths
from tatami.sim.platforms.base import AbstractPlatform

T = TypeVar("T")
Then = Callable[[], None]

_SAME_TIME_S = 1e-9
"""Timers that are nearer to each other take place together."""
_SAME_END_S = 1e-13
"""Ends of transfers are told apart: only rounding makes them differ by less."""


@dataclass(eq=False, slots=True)
class Going:
    """A transfer or a timer that goes on; `Stage.cancel` takes it.

    Attributes:
        number: in the order in which things were started.
        at_s: when it is due; infinity while that is not known.
        flow: of a transfer that shares links.
        rate_bytes_per_s: of a transfer that shares no link.
        moves: whether the latency of a transfer that shares links is over.
    """

    number: int
    then: Then
    at_s: float = float("inf")
    flow: Flow | None = None
    size_bytes: float = 0.0
    rate_bytes_per_s: float = 0.0
    moves: bool = False
    is_held: bool = False
    ended: bool = False


_Timer = tuple[float, int, Going]
"""When, and which number it has. One whose time has changed since counts for nothing."""


class Stage:
    """Machines and links of a platform, ready to be used; made by `play`.

    Attributes:
        speeds_flop_per_s: of a core of each host.
        bytes_moved: of all transfers that were started, those that were cancelled counted up to then.
        now_s: simulated seconds since the start.
    """

    def __init__(self, platform: AbstractPlatform) -> None:
        self.speeds_flop_per_s = platform.speeds_flop_per_s
        self.bytes_moved = 0.0
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._timers: list[_Timer] = []
        self._flows = Flows()
        self._dividing: Going | None = None
        self._paths = LinkPaths(platform)

    def send(self, source: int, target: int, *, size_bytes: float, then: Then) -> Going:
        """Move bytes from one host to another, by their indices; `then` when the last has arrived."""
        self.bytes_moved += size_bytes
        path, whole_bytes = self._paths.of(source, target), max(1, round(size_bytes))
        going = Going(number=next(self._numbers), then=then, size_bytes=size_bytes)
        if not path.lanes:
            going.rate_bytes_per_s = path.most_bytes_per_s
            self._due_at(going, self.now_s + path.latency_s + whole_bytes / path.most_bytes_per_s)
            return going
        going.flow = Flow(what=going, path=path, left_bytes=whole_bytes)
        self.at(self.now_s + path.latency_s, lambda: self._begins(going))
        return going

    def send_all(self, transfers: Sequence[tuple[int, int, float]], then: Then) -> None:
        """Begin several transfers, (source, target, bytes), at once; `then` when all have arrived, now where there are none."""
        left = len(transfers)

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        if not transfers:
            then()
        for source, target, size_bytes in transfers:
            self.send(source, target, size_bytes=size_bytes, then=arrived)

    def after(self, delay_s: float, then: Then) -> Going:
        """Let time pass."""
        return self.at(self.now_s + delay_s, then)

    def soon(self, delay_s: float, then: Then) -> None:
        """As `after`, but at once, before anything else of this time, where there is no delay."""
        if delay_s > 0:
            self.after(delay_s, then)
        else:
            then()

    def at(self, at_s: float, then: Then) -> Going:
        """Do something at a time, at once if it is past."""
        going = Going(number=next(self._numbers), then=then)
        self._due_at(going, at_s)
        return going

    def cancel(self, going: Going) -> None:
        """Break a transfer or a timer off; it may have ended already."""
        if going.ended:
            return
        going.ended = True
        if going.flow is not None:
            self._stops(going)
            self.bytes_moved -= going.flow.left_at(self.now_s) if going.moves else going.size_bytes
        else:
            self.bytes_moved -= min(going.size_bytes, (going.at_s - self.now_s) * going.rate_bytes_per_s)

    def hold(self, going: Going) -> None:
        """Let a transfer that shares links stand still; its latency passes all the same."""
        if not (going.ended or going.is_held or going.flow is None):
            going.is_held = True
            self._stops(going)
            going.at_s = float("inf")

    def release(self, going: Going) -> None:
        """Let a transfer go on that was held."""
        if going.is_held and not going.ended:
            going.is_held = False
            self._moves(going)

    def drive(self) -> None:
        """Let everything happen that was started, and what follows from it, until nothing goes on any more."""
        while self._timers:
            if not _counts(self._timers[0]):
                heapq.heappop(self._timers)
                continue
            self.now_s = max(self.now_s, self._timers[0][0])
            for going in self._due():
                if not going.ended:  # one that ended just now may have cancelled another that did, too
                    going.ended = True
                    if going.flow is not None:
                        self._stops(going)
                    going.then()

    def _due_at(self, going: Going, at_s: float) -> None:
        """It ends at this time, whatever was said before."""
        going.at_s = at_s
        heapq.heappush(self._timers, (at_s, going.number, going))

    def _due(self) -> list[Going]:
        """What ends now."""
        due: list[Going] = []
        later: list[_Timer] = []
        while self._timers and self._timers[0][0] <= self.now_s + _SAME_TIME_S:
            timer = heapq.heappop(self._timers)
            if not _counts(timer):
                continue
            # A transfer that ends a little later is not taken along: its rate may change by what ends now, and so its end.
            # Timers keep theirs.
            if timer[2].flow is not None and timer[0] > self.now_s + _SAME_END_S:
                later.append(timer)
            else:
                due.append(timer[2])
        for timer in later:
            heapq.heappush(self._timers, timer)
        return due

    # -- transfers that share links -------------------------------------------------------------------------------

    def _begins(self, going: Going) -> None:
        """Its latency is over."""
        if not going.ended:
            going.moves = True
            if not going.is_held:
                self._moves(going)

    def _moves(self, going: Going) -> None:
        if going.moves and going.flow is not None:
            self._flows.add(going.flow)
            self._divide_next()

    def _stops(self, going: Going) -> None:
        if going.moves and going.flow is not None:
            self._flows.remove(going.flow, now_s=self.now_s)
            self._divide_next()

    def _divide_next(self) -> None:
        """When all is told that happens at this time."""

        def divide() -> None:
            for flow in self._flows.divide(self.now_s):
                self._due_at(flow.what, flow.ends_s)

        # A timer for now is handled after all that was due now: where 1,000 transfers begin at once, rates are computed once.
        if self._dividing is None or self._dividing.ended:
            self._dividing = self.at(self.now_s, divide)


def play(platform: AbstractPlatform, act: Callable[[Stage], Callable[[], T]]) -> T:
    """Simulate.

    Args:
        act: starts what there is to start; all of it is then driven to its end.

    Returns:
        What the function that `act` returned says when nothing goes on any more.
    """
    stage = Stage(platform)
    finish = act(stage)
    stage.drive()
    return finish()


def _counts(timer: _Timer) -> bool:
    at_s, _, going = timer
    return not going.ended and going.at_s == at_s
