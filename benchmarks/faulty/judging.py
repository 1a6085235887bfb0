"""What follows from when the steps of a run were done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

WARM = 5
"""Steps that are not counted."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A step that was done, when, its loss, and on which hosts."""

    number: int
    at_s: float
    loss: float
    hosts: tuple[str, ...]


def marks_of(text: str) -> list[Mark]:
    """In the order of the steps; of one that two ranks tell of, as a rank has died after it, the first time counts."""
    found: dict[int, Mark] = {}
    for line in text.splitlines():
        number, at_s, loss, hosts = line.split()
        mark = Mark(number=int(number), at_s=float(at_s), loss=float(loss), hosts=tuple(sorted(hosts.split(","))))
        found.setdefault(mark.number, mark)
    return [found[number] for number in sorted(found)]


def usual_s(marks: Sequence[Mark]) -> float:
    """The median of a step, of those that count."""
    return median(later.at_s - earlier.at_s for earlier, later in pairwise(marks[WARM:]))


def throughput(marks: Sequence[Mark], *, speeds: Mapping[str, float]) -> tuple[float, float]:
    """Steps that were done, of those that the machines that were there would have done without changes.

    What they would have done follows from their own median step between two changes, and from the sum of their speeds and the
    first of these medians. A machine is there from the first step that it has done to the last one.
    """
    stretches = _stretches(marks)
    work = by_median = by_speeds = 0.0
    for hosts, spans in stretches:
        power = sum(speeds[host] for host in set(hosts))
        own_s = median(spans[1:]) if len(spans) > 1 else work / power if work else spans[0]  # the first has the change in it
        work = work or own_s * power
        by_median += sum(spans) / own_s
        by_speeds += sum(spans) * power / work
    steps = sum(len(spans) for _, spans in stretches)
    return steps / by_median, steps / by_speeds


def share_of_changes(marks: Sequence[Mark]) -> float:
    """Of the time: what the first steps on other machines took longer than the median of those that followed on them."""
    stretches = _stretches(marks)
    longer = (spans[0] - median(spans[1:]) for _, spans in stretches[1:] if len(spans) > 1)
    return sum(longer) / sum(sum(spans) for _, spans in stretches)


def _stretches(marks: Sequence[Mark]) -> list[tuple[tuple[str, ...], list[float]]]:
    """The machines, and the seconds of each step on them, from one change to the next."""
    steps = [(later.at_s - earlier.at_s, later.hosts) for earlier, later in pairwise(marks[WARM:])]
    return [(hosts, [span for span, _ in group]) for hosts, group in groupby(steps, key=lambda step: step[1])]
