"""The two halves of an all-reduce: reduce-scatter, then all-gather; and how they make a whole, flat or nested.

Nested, rows reduce-scatter among themselves, an all-reduce across the rows joins what belongs together, and the rows gather:
the 2D torus of Mikami et al. 2018 (arXiv 1811.05233), and, with a host for a row, every hierarchical all-reduce.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tatami.collective.pattern import AbstractPattern, Native
from tatami.collective.schedule import Phase, Schedule, check_problem
from tatami.collective.step import RankGroup, Sync

Flat = Callable[[int, int], Schedule]
"""A builder of an all-reduce by (ranks, size) alone."""


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A reduce-scatter and the all-gather that completes it.

    Attributes:
        scatter: member i of a group ends with part i complete.
        gather: member i of a group begins with part i complete.
        order: in which order the scatter sums, in words.
        fixed_order: whether it is the same in every run.
        scatter_sync: what opens and closes the scatter's rounds.
        gather_sync: the same for the gather.
    """

    scatter: AbstractPattern | Native
    gather: AbstractPattern | Native
    order: str
    fixed_order: bool
    scatter_sync: Sync = Sync.ARRIVAL
    gather_sync: Sync = Sync.ARRIVAL


def among_all(
    algorithm: str,
    *phases: tuple[AbstractPattern | Native, Sync],
    ranks: int,
    size: int,
    order: str,
    fixed_order: bool,
) -> Schedule:
    """One group of all ranks, which does one thing after another; nothing where there is one rank, or no element."""
    check_problem(ranks, size)
    done: tuple[Phase, ...] = ()
    if ranks > 1 and size > 0:
        groups = (RankGroup(ranks=tuple(range(ranks)), start=0, stop=size),)
        done = tuple(Phase(groups=groups, what=what, sync=sync) for what, sync in phases)
    return Schedule(algorithm=algorithm, ranks=ranks, size=size, phases=done, order=order, fixed_order=fixed_order)


def flat(algorithm: str, halves: Halves, *, ranks: int, size: int) -> Schedule:
    """One group of all ranks: scatter, then gather."""
    phases = ((halves.scatter, halves.scatter_sync), (halves.gather, halves.gather_sync))
    return among_all(algorithm, *phases, ranks=ranks, size=size, order=halves.order, fixed_order=halves.fixed_order)


def nested(algorithm: str, halves: Halves, *, rows: Sequence[Sequence[int]], size: int, across: Flat) -> Schedule:
    """Reduce-scatter in each row, an all-reduce across the rows, all-gather in each row.

    Rows may differ in length. The elements are cut at the union of all rows' cuts; each segment has one owner in every row,
    and those reduce it across. So every rank carries exactly its own part, and none is a funnel.

    Args:
        algorithm: the schedule's name.
        halves: what a row does; rows of one rank do nothing.
        rows: the ranks of each row, together 0 .. P - 1.
        size: elements.
        across: builds the all-reduce over the owners of a segment, one in each row, top to bottom.
    """
    ranks = sum(len(row) for row in rows)
    check_problem(ranks, size)
    groups = tuple(RankGroup(ranks=tuple(row), start=0, stop=size) for row in rows)
    joined = [across(len(rows), stop - start).placed_phases(owners, offset=start) for start, stop, owners in segments(groups)]
    middle = tuple(_side_by_side(phases) for phases in zip(*joined, strict=True))
    wide = tuple(group for group in groups if group.members > 1 and size > 0)
    column = across(len(rows), size)
    return Schedule(
        algorithm=algorithm,
        ranks=ranks,
        size=size,
        phases=(
            *((Phase(groups=wide, what=halves.scatter, sync=halves.scatter_sync),) if wide else ()),
            *middle,
            *((Phase(groups=wide, what=halves.gather, sync=halves.gather_sync),) if wide else ()),
        ),
        order=_order(halves.order if wide else "", column.order if len(rows) > 1 else ""),
        fixed_order=(halves.fixed_order or not wide) and (column.fixed_order or len(rows) == 1),
    )


def _order(row: str, column: str) -> str:
    if row and column:
        return f"in a row: {row}; then across rows: {column}"
    return row or column or "nothing is summed"


def segments(rows: Sequence[RankGroup]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(start, stop, the owner in each row) of the pieces between the union of all rows' cuts; all rows have the same range."""
    # Rows of the same length cut alike: 10,000 ranks in hosts of 8 have 9 cuts to unite, not 10,000.
    by_length = {row.members: [row.cut(index) for index in range(row.members + 1)] for row in rows}
    cuts = sorted({cut for row_cuts in by_length.values() for cut in row_cuts})
    return [
        (start, stop, tuple(row.ranks[bisect_right(by_length[row.members], start) - 1] for row in rows))
        for start, stop in pairwise(cuts)
    ]


def _side_by_side(phases: Sequence[Phase]) -> Phase:
    """Phases that do the same thing, in different groups, as one."""
    first = phases[0]
    assert all((phase.what, phase.sync) == (first.what, first.sync) for phase in phases), "segments differ in more than size"
    return Phase(groups=tuple(group for phase in phases for group in phase.groups), what=first.what, sync=first.sync)
