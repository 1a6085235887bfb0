"""A platform in a running SimGrid engine, and what goes on there: activities that one actor starts and waits for.

An actor of SimGrid is a thread of the operating system, so there is only one; ten thousand machines are ten thousand
activities, each with what is to be done when it ends. Of what ends at the same time, timers are told of first, then activities
in the order in which they were started.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tatami.sim.engine import simgrid
from tatami.sim.platforms.base import AbstractPlatform

T = TypeVar("T")
Then = Callable[[], None]

_SAME_TIME_S = 1e-9
"""SimGrid's own: events that are nearer to each other take place together."""
_FEW = 4


@dataclass(eq=False, slots=True)
class Going:
    """Something that goes on: what `Stage.cancel` takes.

    Attributes:
        number: in the order in which things were started.
        then: called when it ends.
        activity: SimGrid's; None for a timer.
    """

    number: int
    then: Then
    activity: Any = None
    ended: bool = False


@dataclass(order=True, slots=True)
class _Timer:
    at_s: float
    number: int
    going: Going = field(compare=False)


class Stage:
    """Machines and links of a platform, ready to be used by the one actor; made by `play`.

    Attributes:
        hosts: SimGrid's hosts, in the order of the platform's.
        bytes_moved: of all transfers that were started, those that were cancelled counted up to then.
    """

    def __init__(self, hosts: Sequence[Any]) -> None:
        self._simgrid = simgrid()
        self.hosts = tuple(hosts)
        self.bytes_moved = 0.0
        self._numbers = itertools.count()
        self._pending = self._simgrid.ActivitySet()
        self._going: dict[Any, Going] = {}
        self._timers: list[_Timer] = []

    @property
    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return float(self._simgrid.Engine.clock)

    def send(self, source: int, target: int, *, size_bytes: float, then: Then) -> Going:
        """Move bytes from one host to another, by their indices; `then` when the last has arrived."""
        self.bytes_moved += size_bytes
        return self._start(self._simgrid.Comm.sendto_async(self.hosts[source], self.hosts[target], _whole(size_bytes)), then)

    def compute(self, host: int, *, work_flop: float, then: Then) -> Going:
        """Compute on a host; what else is computed there at the same time shares its speed."""
        execution = self._simgrid.this_actor.exec_init(work_flop)
        execution.host = self.hosts[host]
        return self._start(execution.start(), then)

    def after(self, delay_s: float, then: Then) -> Going:
        """Let time pass."""
        return self.at(self.now_s + delay_s, then)

    def at(self, at_s: float, then: Then) -> Going:
        """Do something at a time, at once if it is past."""
        going = Going(number=next(self._numbers), then=then)
        heapq.heappush(self._timers, _Timer(at_s=at_s, number=going.number, going=going))
        return going

    def cancel(self, going: Going) -> None:
        """Break something off; it may have ended."""
        if going.ended:
            return
        going.ended = True
        if going.activity is not None:
            if isinstance(going.activity, self._simgrid.Comm):
                self.bytes_moved -= going.activity.remaining
            del self._going[going.activity]
            self._pending.erase(going.activity)
            going.activity.cancel()

    def drive(self) -> None:
        """Let everything happen that was started, and what comes of it, until nothing goes on any more."""
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
        self._going[activity] = going
        self._pending.push(activity)
        return going

    def _due(self) -> list[Going]:
        """Timers whose time has come, and whatever ended at that time too."""
        while self._timers and self._timers[0].going.ended:
            heapq.heappop(self._timers)
        due: list[Going] = []
        until_s = self.now_s + _SAME_TIME_S
        while self._timers and self._timers[0].at_s <= until_s:
            timer = heapq.heappop(self._timers)
            if not timer.going.ended:
                due.append(timer.going)
        return due

    def _next(self) -> list[Going]:
        """Wait until something ends, or a timer is due."""
        until_s = self._timers[0].at_s if self._timers else None
        if not self._going:
            if until_s is None:
                return []
            self._simgrid.this_actor.sleep_until(until_s)
            return self._due()
        if until_s is None:
            activity = self._pending.wait_any()
        else:
            try:
                activity = self._pending.wait_any_for(max(0.0, until_s - self.now_s))
            except self._simgrid.TimeoutException:
                return self._due()
        ended = [self._going.pop(activity), *self._ended_too()]
        return [*self._due(), *sorted(ended, key=lambda going: going.number)]

    def _ended_too(self) -> list[Going]:
        """What ended at the same time as something that just did."""
        ended: list[Going] = []
        for _ in range(_FEW):
            if (activity := self._pending.test_any()) is None:
                return ended
            ended.append(self._going.pop(activity))
        # Each test_any is linear in what is pending, a millisecond for 10,000: so many are looked through once.
        done = [activity for activity in self._going if activity.test()]
        ended += [self._going.pop(activity) for activity in done]
        self._pending = self._simgrid.ActivitySet(list(self._going))
        return ended


def play(platform: AbstractPlatform, act: Callable[[Stage], Callable[[], T]]) -> T:
    """Simulate; a process may do it once, so callers are run by `Runs`.

    Args:
        platform: the machines.
        act: starts what there is to start, in the one actor; all of it is then driven to its end.

    Returns:
        What the function that `act` returned says when nothing goes on any more.
    """
    grid = simgrid()
    engine = grid.Engine(["tatami", "--log=root.fmt:%m%n", *platform.fabric.arguments])
    hosts = platform.build(engine)
    results: list[T] = []
    errors: list[BaseException] = []

    def actor() -> None:
        stage = Stage(hosts)
        try:
            finish = act(stage)
            stage.drive()
            results.append(finish())
        except Exception as error:  # it must not pass through SimGrid, which would end the process
            errors.append(error)

    hosts[0].add_actor("driver", actor)
    engine.run()
    if errors:
        raise errors[0]
    return results[0]


def _whole(size_bytes: float) -> int:
    return max(1, round(size_bytes))
