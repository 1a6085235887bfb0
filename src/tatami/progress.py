"""Progress as a value passed in: long work reports to it, and the caller decides what is shown, and where."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from tatami.clock import Clock, SystemClock
from tatami.units import format_duration

_Item = TypeVar("_Item")
_IS_SHOWN = ContextVar("is_shown", default=True)


class Progress(Protocol):
    """What long work reports to. One piece of work at a time: `start`, any number of `advance`, `finish`."""

    def start(self, what: str, *, total: int | None = None, unit: str = "samples") -> None:
        """Work called `what` begins: `total` of `unit`, None where the number is not known."""

    def advance(self, amount: int, *, fields: Mapping[str, str] | None = None) -> None:
        """`amount` more are done; `fields` are shown beside them, as {"loss": "0.12"}, until others take their place."""

    def finish(self) -> None:
        """The work is over, done or given up."""


class NoProgress:
    """Shows nothing: the progress of every rank but one, and of tests."""

    def start(self, what: str, *, total: int | None = None, unit: str = "samples") -> None:
        pass

    def advance(self, amount: int, *, fields: Mapping[str, str] | None = None) -> None:
        pass

    def finish(self) -> None:
        pass


class LineProgress:
    """A line at most every `every_s` seconds of `clock`, and one at the end: for logs and pipes.

    A line shows the rate since the line before it; the last line shows the rate of the whole. With `only_long`, work that
    is over before its first line is due writes no line at all.
    """

    def __init__(
        self, *, clock: Clock, write: Callable[[str], None] = print, every_s: float = 10.0, only_long: bool = False
    ) -> None:
        self._clock = clock
        self._write = write
        self._every_s = every_s
        self._only_long = only_long
        self.start("")

    def start(self, what: str, *, total: int | None = None, unit: str = "samples") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._fields: dict[str, str] = {}
        self._done = self._done_at_line = 0
        self._started_s = self._line_s = self._clock.now_s()

    def advance(self, amount: int, *, fields: Mapping[str, str] | None = None) -> None:
        self._done += amount
        self._fields.update(fields or {})
        now_s = self._clock.now_s()
        elapsed_s = now_s - self._line_s
        if elapsed_s < self._every_s:
            return
        rate = (self._done - self._done_at_line) / elapsed_s
        parts = [self._count(), format_rate(rate, unit=self._unit)]
        if self._total is not None and rate > 0:
            parts.append(f"{format_duration(max(0, self._total - self._done) / rate, digits=2)} left")
        self._line(parts)
        self._line_s, self._done_at_line = now_s, self._done

    def finish(self) -> None:
        if self._only_long and self._line_s == self._started_s:
            return
        elapsed_s = self._clock.now_s() - self._started_s
        parts = [self._count()]
        if elapsed_s > 0:
            parts += [f"in {format_duration(elapsed_s, digits=3)}", format_rate(self._done / elapsed_s, unit=self._unit)]
        self._line(parts)

    def _count(self) -> str:
        if self._total is None:
            return f"{self._done:,} {self._unit}"
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        return f"{self._done:,} of {self._total:,} {self._unit}{share}"

    def _line(self, parts: list[str]) -> None:
        self._write(f"{self._what}: " + " · ".join([*parts, *(f"{name} {text}" for name, text in self._fields.items())]))


def reported(
    items: Iterable[_Item],
    what: str,
    *,
    unit: str,
    is_shown: bool | None = None,
    clock: Clock | None = None,
    write: Callable[[str], None] | None = None,
) -> Iterator[_Item]:
    """Yield `items`. While the caller works on them for longer than 10 s, lines on standard error say how far it is.

    Args:
        items: what is worked on, one after the other.
        what: name of the work.
        unit: of the items, in the plural.
        is_shown: None: as `shown` says, or yes.
        clock, write: for tests.
    """
    listed = list(items)
    if not (_IS_SHOWN.get() if is_shown is None else is_shown):
        yield from listed
        return
    progress = LineProgress(clock=clock or SystemClock(), write=write or _to_standard_error, only_long=True)
    progress.start(what, total=len(listed), unit=unit)
    for item in listed:
        yield item
        progress.advance(1)
    progress.finish()


@contextmanager
def shown(is_shown: bool) -> Iterator[None]:
    """Whether `reported` writes lines in this thread: rank 0 does, the others do not."""
    token = _IS_SHOWN.set(is_shown)
    try:
        yield
    finally:
        _IS_SHOWN.reset(token)


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def format_rate(rate_per_s: float, *, unit: str) -> str:
    """ "8,192 samples/s"; with decimals where it is slow, "0.25 epochs/s"."""
    return f"{rate_per_s:,.0f} {unit}/s" if rate_per_s >= 10 else f"{rate_per_s:.2g} {unit}/s"
