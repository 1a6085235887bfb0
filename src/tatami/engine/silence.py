"""Which processes have been silent for too long: decided for all at one moment, and by the time in which this one listened.

Two clocks of a run are here: one that shows the time since its first step, and one that goes only while its process listens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tatami.clock import Clock

_Name = TypeVar("_Name")


@dataclass(frozen=True, kw_only=True)
class Sign:
    """The last sign of life of a process: when it was heard, and for how long the process may be silent after it."""

    heard_s: float
    limit_s: float


def silent(signs: Mapping[_Name, Sign], *, now_s: float) -> tuple[_Name, ...]:
    """Names of the processes that have been silent for longer than they may."""
    return tuple(name for name, sign in signs.items() if now_s - sign.heard_s > sign.limit_s)


class RunClock:
    """Shows seconds since the first step of a run; before that step, since the run was made.

    Attributes:
        startup_s: seconds from the making of the run to the first step; 0 before it.
    """

    def __init__(self, clock: Clock) -> None:
        self.startup_s = 0.0
        self._clock = clock
        self._zero_s = clock.now_s()

    def now_s(self) -> float:
        return self._clock.now_s() - self._zero_s

    def first_step(self) -> None:
        """Note that the first step begins now."""
        self.startup_s = self.now_s()
        self._zero_s += self.startup_s


class Listening:
    """A clock that goes only while this process listens to signs of life.

    While a handler runs for long, or this process is stopped or without a core, signs of life wait to be read. No process is
    judged by that time: of each step of another clock no more than `longest_step_s` counts.

    Attributes:
        now_s: what this clock shows; 0 at first.
    """

    def __init__(self, clock_s: float, *, longest_step_s: float) -> None:
        self.now_s = 0.0
        self._clock_s = clock_s
        self._longest_step_s = longest_step_s

    @property
    def heard_s(self) -> float:
        """When a sign of life that is read now was heard: not before it, as this clock shows its last step only."""
        return self.now_s + self._longest_step_s

    def advance(self, clock_s: float) -> None:
        """The other clock shows `clock_s` now."""
        self.now_s += min(max(0.0, clock_s - self._clock_s), self._longest_step_s)
        self._clock_s = clock_s


class Watched(Protocol):
    """Processes that give signs of life."""

    def signs(self) -> Mapping[Any, Sign]:
        """The last of each, by name."""

    def late(self, name: Any, /) -> None:
        """This one has been silent for too long; what is done about it may take long."""


def look(groups: Sequence[Watched], *, now_s: float, read: Callable[[], bool]) -> None:
    """Report the members that are silent at `now_s`, and have not been heard of before it is their turn.

    Args:
        groups: of processes.
        now_s: one moment for all, from before anything is done about any of them.
        read: reads the signs of life that wait; whether to go on.
    """
    found = [(group, name) for group in groups for name in silent(group.signs(), now_s=now_s)]
    for group, name in found:
        if not read():
            return
        if name in silent(group.signs(), now_s=now_s):
            group.late(name)
