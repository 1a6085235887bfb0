"""Slowdowns of a whole run: recorded in a file, or drawn from a seed."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path

from tatami.errors import InputError
from tatami.inputs import read_text
from tatami.sim.tiling.changes import Change
from tatami.units import parse_duration

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
