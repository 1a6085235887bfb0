"""Where the time of a tiled iteration goes, by the stopwatches of all ranks: compute, waiting, sums, overhead.

A rank's stopwatch cannot tell a transfer from the wait for a rank that comes late to it. All together can: the rank that comes
last waits for no other, so the shortest of a group is what the transfer takes, and what others have beyond it they waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from tatami.runtime.phases import PhaseTimes


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
        tensor_parallel_s: exchanges inside the replica.
        gradients_s: exchanges across replicas.
        overhead_s: outside of all phases: the loop, picking samples, checks of the balance.
    """

    compute_s: float
    waiting_s: float
    tensor_parallel_s: float
    gradients_s: float
    overhead_s: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def breakdown(iterations: Sequence[Sequence[RankIteration]], *, replicas: Mapping[int, int]) -> list[Breakdown]:
    """The mean breakdown of every rank.

    Args:
        iterations: by rank, all ranks the same iterations.
        replicas: the replica of every rank that has a tile.
    """
    parts: list[list[Breakdown]] = [[] for _ in iterations]
    for one in zip(*iterations, strict=True):
        least = min(each.times.gradients_s for each in one)
        least_of: dict[int | None, float] = {}
        for rank, each in enumerate(one):
            replica = replicas.get(rank)
            least_of[replica] = min(least_of.get(replica, each.times.tensor_parallel_s), each.times.tensor_parallel_s)
        for rank, each in enumerate(one):
            tensor_parallel_s = least_of[replicas.get(rank)]
            parts[rank].append(
                Breakdown(
                    compute_s=each.times.compute_s,
                    waiting_s=each.times.tensor_parallel_s - tensor_parallel_s + each.times.gradients_s - least,
                    tensor_parallel_s=tensor_parallel_s,
                    gradients_s=least,
                    overhead_s=each.wall_s - each.times.total_s,
                )
            )
    return [mean_breakdown(own) for own in parts]


def mean_breakdown(parts: Sequence[Breakdown]) -> Breakdown:
    """The mean of several, part by part."""
    return Breakdown(
        compute_s=fmean(each.compute_s for each in parts),
        waiting_s=fmean(each.waiting_s for each in parts),
        tensor_parallel_s=fmean(each.tensor_parallel_s for each in parts),
        gradients_s=fmean(each.gradients_s for each in parts),
        overhead_s=fmean(each.overhead_s for each in parts),
    )
