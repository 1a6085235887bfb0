"""The progress bar of a terminal, and the choice between it and lines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from tatami.clock import Clock, SystemClock
from tatami.errors import MissingExtraError
from tatami.progress import LineProgress, Progress, format_rate


def progress_for(stream: TextIO | None = None, *, clock: Clock | None = None) -> Progress:
    """A bar where `stream` (stderr by default) is a terminal and rich is installed; a line every 10 s otherwise."""
    out = sys.stderr if stream is None else stream
    clock = clock or SystemClock()
    if out.isatty():
        try:
            return BarProgress(out, clock=clock)
        except MissingExtraError:  # a bar is a comfort: lines say the same
            pass
    return LineProgress(clock=clock, write=lambda line: print(line, file=out, flush=True))


class BarProgress:
    """One rich bar with the count, the rate, the time left and the fields; `finish` leaves it standing.

    Raises:
        MissingExtraError: rich is not installed.
    """

    def __init__(self, stream: TextIO, *, clock: Clock) -> None:
        try:
            self._rich: Any = importlib.import_module("rich.progress")
            console: Any = importlib.import_module("rich.console")
        except ImportError:
            raise MissingExtraError("rich (for progress bars)", extra="cli") from None
        self._console = console.Console(file=stream)
        self._clock = clock
        self._bar: Any = None
        self._unit = "samples"
        self._fields: dict[str, str] = {}
        self._started_s = 0.0

    def start(self, what: str, *, total: int | None = None, unit: str = "samples") -> None:
        self.finish()
        rich = self._rich
        self._bar = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(bar_width=None),  # what the numbers leave
            rich.MofNCompleteColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            get_time=self._clock.now_s,
            expand=True,
        )
        self._bar.add_task(what, total=total, text="")
        self._unit, self._fields, self._started_s = unit, {}, self._clock.now_s()
        self._bar.start()

    def advance(self, amount: int, *, fields: Mapping[str, str] | None = None) -> None:
        if self._bar is None:
            return
        self._fields.update(fields or {})
        task = self._bar.tasks[0]
        # rich's own speed looks back 30 s; before its first samples are in, the mean since the start stands in for it.
        elapsed_s = self._clock.now_s() - self._started_s
        rate = task.speed or ((task.completed + amount) / elapsed_s if elapsed_s > 0 else 0.0)
        text = " · ".join([format_rate(rate, unit=self._unit), *(f"{name} {value}" for name, value in self._fields.items())])
        self._bar.update(task.id, advance=amount, text=text)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
