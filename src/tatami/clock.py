"""Time as an argument: what needs the time is handed a clock, so that a test can hand it another."""

from __future__ import annotations

import time
from typing import Protocol


class Pace(Protocol):
    """Told when a stretch of local compute begins and when it ends, before its time is taken.

    In real runs it does nothing; `tatami.testing.Slowdown` sleeps at the end, so that one machine can play several unequal
    ones.
    """

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Clock(Protocol):
    """A monotonic clock and the sleep that belongs to it, both in seconds."""

    def now_s(self) -> float: ...

    def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    """The machine's own monotonic clock."""

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


class NoPace:
    """The pace of a real run: go on at once."""

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


NO_PACE = NoPace()
