"""Speeds that change while a run goes on: single changes, and slowdowns of a whole run, from a file or drawn from a seed."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tatami.errors import InputError
from tatami.inputs import read_text
from tatami.units import parse_duration


@dataclass(frozen=True, kw_only=True)
class Change:
    """From some time on a processor has `factor` times the speed that it began with: 0.5 is half.

    Attributes:
        processor: its name.
        factor: of its first speed, whatever changes came before.
        at_s: simulated seconds; or
        at_iteration: the first iteration, counted from 1, that begins with it.

    Raises:
        InputError: a factor that is not positive, or not exactly one of the two times.
    """

    processor: str
    factor: float
    at_s: float | None = None
    at_iteration: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise InputError(f"a change of {self.processor}'s speed needs a finite factor > 0, not {self.factor}")
        if (self.at_s is None) == (self.at_iteration is None):
            raise InputError(f"a change of {self.processor}'s speed is either at_s or at_iteration, one of them")
        if (self.at_s is not None and not self.at_s >= 0) or (self.at_iteration is not None and self.at_iteration < 1):
            raise InputError(f"a change of {self.processor}'s speed is at >= 0 s, or at iteration >= 1, not {self}")


class Speeds:
    """The speed of every processor at any time: `finish_s` says when work will be done.

    Args:
        flop_per_s: what each begins with, by name.
        changes: of some of them.
    """

    def __init__(self, flop_per_s: dict[str, float], *, changes: Iterable[Change]) -> None:
        self._first = flop_per_s
        self._now = dict(flop_per_s)
        listed = list(changes)
        self._timed = sorted(((c.at_s, c) for c in listed if c.at_s is not None), key=lambda each: each[0])
        self._counted = sorted(
            ((c.at_iteration, c) for c in listed if c.at_iteration is not None), key=lambda each: each[0], reverse=True
        )

    def begin(self, iteration: int) -> None:
        """The changes of an iteration take place."""
        while self._counted and self._counted[-1][0] <= iteration:
            _, change = self._counted.pop()
            self._now[change.processor] = self._first[change.processor] * change.factor

    def finish_s(self, processor: str, *, work_flop: float, begin_s: float) -> float:
        """When work that begins at a time is done, at the speeds from then on."""
        at_s, left = begin_s, work_flop
        speed = self._now[processor]
        for change_s, change in self._timed:
            if change.processor != processor:
                continue
            if change_s > at_s:
                if left <= (change_s - at_s) * speed:
                    break
                left -= (change_s - at_s) * speed
                at_s = change_s
            speed = self._first[processor] * change.factor
        return at_s + left / speed

    @property
    def next_iteration(self) -> float:
        """The next iteration that begins with a change; infinity where there is none."""
        return self._counted[-1][0] if self._counted else math.inf

    def next_s(self, after_s: float) -> float:
        """The first time after this one at which a speed changes; infinity where there is none."""
        return next((at_s for at_s, _ in self._timed if at_s > after_s), math.inf)


SLOWER = (1.1, 1.25, 1.5, 2.0, 4.0)
"""How many times as long a drawn slowdown takes."""
_HEAD = ["when", "processor", "slower"]


def read_trace(path: Path) -> tuple[Change, ...]:
    """The changes in a CSV file with the columns when,processor,slower: `iteration:30,p0,2`, or `2s,p0,2`; 1 ends a slowdown.

    Raises:
        InputError: a file that is not there, or a line that is not such; says which.
    """
    lines = csv.reader(read_text(path, what="the trace", largest_bytes=None).splitlines())
    rows = [(number, row) for number, row in enumerate(lines, start=1) if row and not row[0].startswith("#")]
    if not rows or [each.strip() for each in rows[0][1]] != _HEAD:
        raise InputError(f"the trace {path} must begin with the line {','.join(_HEAD)}, and go on as in iteration:30,p0,2")
    found = []
    for number, row in rows[1:]:
        try:
            when, processor, slower = (each.strip() for each in row)
            found.append(change_at(when, processor=processor, slower=float(slower)))
        except (ValueError, ZeroDivisionError) as error:
            raise InputError(
                f"line {number} of the trace {path} must be WHEN,NAME,FACTOR, as iteration:30,p0,2; not "
                f"{','.join(row)!r} ({error})"
            ) from None
    return tuple(found)


def draw_trace(processors: Sequence[str], *, iterations: int, seed: int) -> tuple[Change, ...]:
    """Each processor becomes slow once in so many iterations in the mean, for a fifth of that, by one of `SLOWER`.

    Times between slowdowns and their lengths are exponentially distributed; these are shares of the run, so that a short one
    shows something, and not how often machines become slow.
    """
    found = []
    for rank, name in enumerate(processors):
        # A sequence for each, so that a processor's slowdowns do not depend on how many others there are.
        chance = random.Random(seed * 1_000_003 + rank)
        at = 1
        while True:
            at += 1 + int(chance.expovariate(1 / iterations))
            if at > iterations:
                break
            found.append(Change(processor=name, factor=1 / chance.choice(SLOWER), at_iteration=at))
            at += 1 + int(chance.expovariate(5 / iterations))
            if at > iterations:
                break
            found.append(Change(processor=name, factor=1.0, at_iteration=at))
    return tuple(found)


def change_at(when: str, *, processor: str, slower: float) -> Change:
    """A change at "iteration:30" or at a time, as "2s"; `slower` is how many times as long everything takes.

    Raises:
        InputError, ValueError: `when` is neither, or `slower` is not above 0.
    """
    if not slower > 0:
        raise ValueError(f"{slower} times as slow")
    if when.startswith("iteration:"):
        return Change(processor=processor, factor=1 / slower, at_iteration=int(when.removeprefix("iteration:")))
    return Change(processor=processor, factor=1 / slower, at_s=parse_duration(when))
