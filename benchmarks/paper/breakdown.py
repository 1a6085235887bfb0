"""Where the time of a tiled iteration goes, by the stopwatches of all ranks: compute, waiting, vertical, horizontal, overhead.

A rank's stopwatch cannot tell a transfer from the wait for a rank that comes late to it. All together can: the rank that comes
last waits for no other, so the shortest of a group is what the transfer takes, and what others have beyond it they waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from tatami.tiled.phases import PhaseTimes


@dataclass(frozen=True, kw_only=True)
class RankIteration:
    """One iteration of one rank: how long it was, and the part of it that the phases account for."""

    wall_s: float
    times: PhaseTimes


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of an iteration of one rank, by what they went to; together the iteration.

    Attributes:
        compute_s: forward, backward and update.
        waiting_s: for ranks that came later to an exchange.
        vertical_s: exchanges inside the column.
        horizontal_s: exchanges across columns.
        overhead_s: outside of all phases: the loop, picking samples, checks of the balance.
    """

    compute_s: float
    waiting_s: float
    vertical_s: float
    horizontal_s: float
    overhead_s: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def breakdown(iterations: Sequence[Sequence[RankIteration]], *, columns: Mapping[int, int]) -> list[Breakdown]:
    """The mean breakdown of every rank.

    Args:
        iterations: by rank, all ranks the same iterations.
        columns: the column of every rank that has a tile.
    """
    parts: list[list[Breakdown]] = [[] for _ in iterations]
    for one in zip(*iterations, strict=True):
        least = min(each.times.horizontal_s for each in one)
        least_of: dict[int | None, float] = {}
        for rank, each in enumerate(one):
            column = columns.get(rank)
            least_of[column] = min(least_of.get(column, each.times.vertical_s), each.times.vertical_s)
        for rank, each in enumerate(one):
            vertical_s = least_of[columns.get(rank)]
            parts[rank].append(
                Breakdown(
                    compute_s=each.times.compute_s,
                    waiting_s=each.times.vertical_s - vertical_s + each.times.horizontal_s - least,
                    vertical_s=vertical_s,
                    horizontal_s=least,
                    overhead_s=each.wall_s - each.times.total_s,
                )
            )
    return [mean_breakdown(own) for own in parts]


def mean_breakdown(parts: Sequence[Breakdown]) -> Breakdown:
    """The mean of several, part by part."""
    return Breakdown(
        compute_s=fmean(each.compute_s for each in parts),
        waiting_s=fmean(each.waiting_s for each in parts),
        vertical_s=fmean(each.vertical_s for each in parts),
        horizontal_s=fmean(each.horizontal_s for each in parts),
        overhead_s=fmean(each.overhead_s for each in parts),
    )
