"""Waiting for whichever of some activities ends next.

The actor that asks waits for a few activities itself. For very many it has other actors wait, each for its share. The reason:
when one of the n activities that an actor waits for ends, SimGrid 4.1 takes all n off a list, from its front, which makes
n^2 / 2 moves; for 100,000 activities that takes 14 s. With g actors there are n^2 / 2g moves.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Generic, TypeVar

from tatami.errors import SimulationError
from tatami.sim.engine import simgrid

What = TypeVar("What")

MANY = 4000
"""More than so many activities are waited for by others."""
SHARE = 2000
"""Activities of one actor, which is a thread: starting it costs as much as some thousand activities do."""
_FEW = 4


class PendingActivities(Generic[What]):
    """Activities that go on, each with what it stands for.

    Args:
        host: where the actors live that wait.
    """

    def __init__(self, host: Any) -> None:
        self._simgrid = simgrid()
        self._going: dict[Any, What] = {}
        self._num_executions = 0
        self._own = self._simgrid.ActivitySet()
        self._others: _Others | None = None
        self._host = host

    def __len__(self) -> int:
        return len(self._going)

    def __contains__(self, activity: Any) -> bool:
        return activity in self._going

    @property
    def all(self) -> list[What]:
        """What goes on, in the order in which it was added."""
        return list(self._going.values())

    def add(self, activity: Any, what: What) -> None:
        """Wait for this one, too, from now on."""
        self._going[activity] = what
        self._num_executions += not isinstance(activity, self._simgrid.Comm)
        if self._others is None:
            self._own.push(activity)
        else:
            self._others.left.append(activity)

    def drop(self, activity: Any) -> None:
        """Wait for it no more; the caller cancels it next."""
        self._forget(activity)
        if self._others is None:
            self._own.erase(activity)

    def next(self, until_s: float | None) -> list[What]:
        """All that end together next, in no order; nothing where that is not before `until_s`.

        Raises:
            SimulationError: a transfer failed.
        """
        if self._others is None and len(self._going) > MANY:
            self._others = _Others(self._host, left=list(self._going))
        elif self._others is not None and not self._others.num_waiting and len(self._going) <= MANY:
            self._others, self._own = None, self._simgrid.ActivitySet(list(self._going))
        try:
            ended = self._next_of_own(until_s) if self._others is None else self._next_of_others(self._others, until_s)
        except self._simgrid.NetworkFailureException:
            raise SimulationError(
                f"after {self._simgrid.Engine.clock:g} simulated seconds a link went down that a transfer was under way on. "
                "Here links do not fail by the platform's file: take its state files out; failures are drawn, as by --link-mtbf"
            ) from None
        return [self._forget(activity) for activity in ended]

    def _forget(self, activity: Any) -> What:
        self._num_executions -= not isinstance(activity, self._simgrid.Comm)
        return self._going.pop(activity)

    def _next_of_own(self, until_s: float | None) -> list[Any]:
        if until_s is None:
            first = self._own.wait_any()
        else:
            try:
                first = self._own.wait_any_for(_from_now_s(self._simgrid, until_s))
            except self._simgrid.TimeoutException:
                return []
        # SimGrid's own test of an activity asks its kernel, 100 times as long as a look at when a transfer ended; its test of a
        # set does so for all that is pending.
        if self._num_executions:
            others = [activity for activity in self._going if activity is not first and self._has_ended(activity)]
        else:
            others = [each for each in self._going if each.finish_time >= 0 and each is not first and each.test()]
        if len(others) > _FEW:
            known = {first, *others}
            self._own = self._simgrid.ActivitySet([activity for activity in self._going if activity not in known])
        else:
            for activity in others:
                self._own.erase(activity)
        return [first, *others]

    def _has_ended(self, activity: Any) -> bool:
        """As `activity.test()`."""
        under_way = isinstance(activity, self._simgrid.Comm) and activity.finish_time < 0 and activity.state_str == "STARTED"
        return not under_way and bool(activity.test())

    def _next_of_others(self, others: _Others, until_s: float | None) -> list[Any]:
        ended: list[Any] = []
        while not ended:
            others.left = [activity for activity in others.left if activity in self._going]
            others.start()
            woken = others.wait(None if until_s is None else _from_now_s(self._simgrid, until_s))
            if not woken:
                return []
            for activity in woken:
                if activity in self._going:  # else it was cancelled, which wakes as well
                    (ended if self._has_ended(activity) else others.left).append(activity)
            if any(isinstance(activity, self._simgrid.Comm) and activity.state_str == "FAILED" for activity in ended):
                raise self._simgrid.NetworkFailureException
        return ended


class _Others:
    """Actors that wait.

    Attributes:
        left: what none of them waits for yet.
        num_waiting: how many they are.
    """

    def __init__(self, host: Any, *, left: list[Any]) -> None:
        self._simgrid = simgrid()
        self._host = host
        self._woken = self._simgrid.Semaphore(0)
        self._shares: list[list[Any]] = []
        self.left = left
        self.num_waiting = 0

    def start(self) -> None:
        """Have what is left waited for."""
        for first in range(0, len(self.left), SHARE):
            self.num_waiting += 1
            self._host.add_actor("waiting", self._wait_for, self.left[first : first + SHARE])
        self.left = []

    def wait(self, timeout_s: float | None) -> list[Any]:
        """The shares of all in which something has ended by the time that anything has; they wait no more.

        Nothing, where nothing ends within `timeout_s`. What was cancelled counts as ended.
        """
        if timeout_s is None:
            self._woken.acquire()
        elif self._woken.acquire_timeout(timeout_s):
            return []
        # Every other actor woken at this time has its turn before this actor goes on.
        self._simgrid.this_actor.yield_()
        shares, self._shares = self._shares, []
        for _ in shares[1:]:
            self._woken.acquire()
        self.num_waiting -= len(shares)
        return [activity for share in shares for activity in share]

    def _wait_for(self, share: list[Any]) -> None:
        # These end a computation or a transfer that was cancelled. One that fails by itself is still seen to have failed later.
        with suppress(self._simgrid.CancelException, self._simgrid.NetworkFailureException):
            self._simgrid.ActivitySet(share).wait_any()
        self._shares.append(share)
        self._woken.release()


def _from_now_s(grid: Any, until_s: float) -> float:
    return max(0.0, until_s - float(grid.Engine.clock))
