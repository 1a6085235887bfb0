"""A platform in a running SimGrid engine, and what goes on there: activities that one actor starts and waits for.

An actor of SimGrid is a thread of the operating system, so there is only one (very many activities have a few more that wait
for them); ten thousand machines are ten thousand activities, each with what is to be done when it ends. Of what ends at the
same time, timers are handled first, then activities in the order in which they were started.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tatami.sim.engine import simgrid
from tatami.sim.flows import Flow, Flows, LinkPath, LinkPaths
from tatami.sim.platforms.base import AbstractPlatform
from tatami.sim.waiting import PendingActivities

T = TypeVar("T")
Then = Callable[[], None]

_SAME_TIME_S = 1e-9
"""SimGrid's own: events that are nearer to each other take place together."""
_SAME_END_S = 1e-13
"""Ends of transfers are told apart, as SimGrid does: only rounding makes them differ by less."""


@dataclass(eq=False, slots=True)
class Going:
    """An activity or a timer that goes on; `Stage.cancel` takes it.

    Attributes:
        number: in the order in which things were started.
        then: called when it ends.
        activity: SimGrid's; None for a timer.
        stop: of a transfer that is a timer: breaks it off, and says how many bytes it has not moved.
        at_s: of a timer, when it is due.
        is_flow: whether it is the end of a transfer that is divided here.
    """

    number: int
    then: Then
    activity: Any = None
    stop: Callable[[], float] | None = None
    at_s: float = math.inf
    is_flow: bool = False
    ended: bool = False


_Timer = tuple[float, int, Going]
"""When, and which number it has: of timers for the same time the one that was started first comes first. One whose time has
changed since counts for nothing."""


class Stage:
    """Machines and links of a platform, ready to be used by the one actor; made by `play`.

    A transfer that shares no link (`AbstractPlatform.unshared`) is a timer: SimGrid's solver looks at all transfers whenever
    one ends. Its clock stands still while there are only timers, and is put right before the next activity begins.

    Args:
        hosts: SimGrid's hosts, in the order of the platform's.
        platform: the same.
        meet_few: links are divided among transfers by `Flows`, which are timers as well; else by SimGrid.

    Attributes:
        hosts: SimGrid's hosts, in the order of the platform's.
        bytes_moved: of all transfers that were started, those that were cancelled counted up to then.
    """

    def __init__(self, hosts: Sequence[Any], platform: AbstractPlatform, *, meet_few: bool = False) -> None:
        self._simgrid = simgrid()
        self._platform = platform
        self._now_s = 0.0
        self._is_ahead = False
        self.hosts = tuple(hosts)
        self.bytes_moved = 0.0
        self._numbers = itertools.count()
        self._waiting: PendingActivities[Going] = PendingActivities(hosts[0])
        self._timers: list[_Timer] = []
        self._flows = Flows() if meet_few else None
        self._dividing: Going | None = None
        self._paths = LinkPaths(hosts, evenly=platform.shares_evenly)

    @property
    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return self._now_s

    def send(self, source: int, target: int, *, size_bytes: float, then: Then) -> Going:
        """Move bytes from one host to another, by their indices; `then` when the last has arrived."""
        self.bytes_moved += size_bytes
        whole_bytes = _whole(size_bytes)
        link = self._platform.unshared(source, target)
        if link is not None:
            ends_s = self._now_s + link.transfer_s(whole_bytes)
            going = self.at(ends_s, then)
            going.stop = lambda: min(size_bytes, (ends_s - self._now_s) * link.bandwidth_bytes_per_s)
            return going
        if self._flows is not None and source != target:
            return self._flow(self._flows, self._paths.of(source, target), whole_bytes, then)
        if self._platform.shares_evenly and source != target:
            return self._late(source, target, whole_bytes, then)
        self._catch_up()
        return self._start(self._simgrid.Comm.sendto_async(self.hosts[source], self.hosts[target], whole_bytes), then)

    def compute(self, host: int, *, work_flop: float, then: Then) -> Going:
        """Compute on a host; what else is computed there at the same time shares its speed."""
        self._catch_up()
        execution = self._simgrid.this_actor.exec_init(work_flop)
        execution.host = self.hosts[host]
        return self._start(execution.start(), then)

    def after(self, delay_s: float, then: Then) -> Going:
        """Let time pass."""
        return self.at(self.now_s + delay_s, then)

    def at(self, at_s: float, then: Then) -> Going:
        """Do something at a time, at once if it is past."""
        going = Going(number=next(self._numbers), then=then)
        self._due_at(going, at_s)
        return going

    def cancel(self, going: Going) -> None:
        """Break an activity or a timer off; it may have ended already."""
        if going.ended:
            return
        going.ended = True
        if going.stop is not None:
            self.bytes_moved -= going.stop()
        elif going.activity in self._waiting:  # neither a timer nor ended just now
            if isinstance(going.activity, self._simgrid.Comm):
                self.bytes_moved -= going.activity.remaining
            self._waiting.drop(going.activity)
            going.activity.cancel()

    def clear(self) -> None:
        """Break everything off."""
        for going in [*self._waiting.all, *(going for _, _, going in self._timers)]:
            self.cancel(going)

    def drive(self) -> None:
        """Let everything happen that was started, and what follows from it, until nothing goes on any more."""
        while True:
            ended = self._due() or self._next()
            if not ended:
                return
            for going in ended:
                if not going.ended:  # one that ended just now may have cancelled another that did, too
                    going.ended = True
                    going.then()

    def _start(self, activity: Any, then: Then) -> Going:
        going = Going(number=next(self._numbers), then=then, activity=activity)
        self._waiting.add(activity, going)
        return going

    def _due_at(self, going: Going, at_s: float) -> None:
        """Make it a timer, or one for another time."""
        going.at_s = at_s
        heapq.heappush(self._timers, (at_s, going.number, going))

    def _due(self) -> list[Going]:
        """Timers whose time has come, and activities that ended at that time too."""
        while self._timers and not _counts(self._timers[0]):
            heapq.heappop(self._timers)
        due: list[Going] = []
        later: list[_Timer] = []
        while self._timers and self._timers[0][0] <= self._now_s + _SAME_TIME_S:
            timer = heapq.heappop(self._timers)
            if not _counts(timer):
                continue
            if timer[2].is_flow and timer[0] > self._now_s + _SAME_END_S:
                later.append(timer)
            else:
                due.append(timer[2])
        for timer in later:
            heapq.heappush(self._timers, timer)
        return due

    def _next(self) -> list[Going]:
        """Wait until something ends, or a timer is due."""
        until_s = self._timers[0][0] if self._timers else None
        if len(self._waiting):
            ended = self._waiting.next(until_s)
            self._now_s = float(self._simgrid.Engine.clock)
            return [*self._due(), *sorted(ended, key=lambda going: going.number)]
        if until_s is None:
            return []
        self._now_s, self._is_ahead = max(self._now_s, until_s), True
        return self._due()

    def _late(self, source: int, target: int, size_bytes: int, then: Then) -> Going:
        """A transfer whose latency is a timer: SimGrid is told of none, for it would share links out by latencies."""
        going = Going(number=next(self._numbers), then=then, stop=lambda: size_bytes)

        def begin() -> None:
            if not going.ended:
                going.stop = None
                self._catch_up()
                going.activity = self._simgrid.Comm.sendto_async(self.hosts[source], self.hosts[target], size_bytes)
                self._waiting.add(going.activity, going)

        self.at(self._now_s + self._paths.of(source, target).latency_s, begin)
        return going

    # -- transfers that are divided here ------------------------------------------------------------------------------

    def _flow(self, flows: Flows, path: LinkPath, size_bytes: int, then: Then) -> Going:
        moves = False

        def begin() -> None:
            nonlocal moves
            if not going.ended:
                moves = True
                flows.add(flow)
                self._divide_next(flows)

        def end() -> None:
            flows.remove(flow)
            self._divide_next(flows)
            then()

        def stop() -> float:
            if not moves:
                return size_bytes
            flows.remove(flow)
            self._divide_next(flows)
            return flow.left_at(self._now_s)

        going = Going(number=next(self._numbers), then=end, stop=stop, is_flow=True)
        flow = Flow(what=going, path=path, left_bytes=size_bytes)
        self.at(self._now_s + path.latency_s, begin)
        return going

    def _divide_next(self, flows: Flows) -> None:
        """When all is told that happens at this time."""

        def divide() -> None:
            for flow in flows.divide(self._now_s):
                self._due_at(flow.what, flow.ends_s)

        if self._dividing is None or self._dividing.ended:
            self._dividing = self.at(self._now_s, divide)

    def _catch_up(self) -> None:
        if self._is_ahead:
            self._simgrid.this_actor.sleep_until(self._now_s)
            self._now_s, self._is_ahead = float(self._simgrid.Engine.clock), False


_built: list[tuple[AbstractPlatform, Any, list[Any]]] = []


def built() -> AbstractPlatform | None:
    """The platform that this process has, or one that it was forked from had."""
    return _built[0][0] if _built else None


def build(platform: AbstractPlatform) -> tuple[Any, list[Any]]:
    """SimGrid's engine with this platform, and its hosts; a process can have one platform only."""
    if platform != built():
        late = ["--cfg=network/latency-factor:0"] if platform.shares_evenly else []
        engine = simgrid().Engine(["tatami", "--log=root.fmt:%m%n", *platform.fabric.arguments, *late])
        _built[:] = [(platform, engine, platform.build(engine))]
    _, engine, hosts = _built[0]
    return engine, hosts


def play(platform: AbstractPlatform, act: Callable[[Stage], Callable[[], T]], *, meet_few: bool = False) -> T:
    """Simulate; a process may do it once, so callers are run by `Runs`.

    Args:
        platform: the machines; they are there already where `build` was called in this process, or in one it was forked from.
        act: starts what there is to start, in the one actor; all of it is then driven to its end.
        meet_few: as of `Stage`.

    Returns:
        What the function that `act` returned says when nothing goes on any more.
    """
    engine, hosts = build(platform)
    results: list[T] = []
    errors: list[BaseException] = []

    def actor() -> None:
        stage = Stage(hosts, platform, meet_few=meet_few)
        try:
            finish = act(stage)
            stage.drive()
            results.append(finish())
        except Exception as error:  # it must not pass through SimGrid, which would end the process
            errors.append(error)
            stage.clear()

    hosts[0].add_actor("driver", actor)
    engine.run()
    if errors:
        raise errors[0]
    return results[0]


def _counts(timer: _Timer) -> bool:
    at_s, _, going = timer
    return not going.ended and going.at_s == at_s


def _whole(size_bytes: float) -> int:
    return max(1, round(size_bytes))
