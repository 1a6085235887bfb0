"""A replica re-mapping, and what a layout is going to cost in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tatami.cluster import speed_at
from tatami.tiling import Layout
from tatami.workload import Workload


def recut(layout: Layout, *, speeds: Mapping[str, float], units: int) -> Layout:
    """Same replicas, members, order and widths; only the cuts inside each replica move (section 5).

    Args:
        speeds: of every processor in it, > 0.
        units: no processor gets less than one of these.
    """
    return Layout(
        replicas=tuple(
            replace(replica, heights=_heights([speeds[name] for name in replica.processors], least=1 / units))
            for replica in layout.replicas
        )
    )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Compute times of a layout at the estimated speeds.

    Attributes:
        ratio: the shortest over the longest of all processors.
        slowest: of the replica that takes longest, in which the slowest of each block counts; only ratios of it mean anything.
    """

    ratio: float
    slowest: float


def forecast(layout: Layout, *, workload: Workload, speeds: Mapping[str, float]) -> Forecast:
    """Work over speed, block by block, in whole samples and units."""
    slowest, of_each = 0.0, []
    for replica, samples in zip(layout.replicas, layout.sample_sizes(workload.samples), strict=True):
        times = samples * workload.passes(recomputes=replica.recomputes)
        works = [[times * section.work(size) for size in replica.unit_sizes(section.units)] for section in workload.sections]
        sizes = [sum(own) / workload.work_flop for own in zip(*works, strict=True)]
        rates = [speed_at(speeds[name], size) for name, size in zip(replica.processors, sizes, strict=True)]
        spent_s = [[work / rate for work, rate in zip(own, rates, strict=True)] for own in works]
        slowest = max(slowest, sum(map(max, spent_s)))
        of_each += [spent for spent in map(sum, zip(*spent_s, strict=True)) if spent]
    return Forecast(ratio=min(of_each) / max(of_each), slowest=slowest)


def works_of(layout: Layout, *, workload: Workload) -> dict[str, float]:
    """`Workload.tile_work` of every processor that has a tile, with what it recomputes."""
    works = {}
    for replica, samples in zip(layout.replicas, layout.sample_sizes(workload.samples), strict=True):
        sizes = [replica.unit_sizes(block.units) for block in workload.blocks]
        for place, name in enumerate(replica.processors):
            work = workload.tile_work([size[place] for size in sizes], samples=samples)
            works[name] = work * workload.passes(recomputes=replica.recomputes)
    return works


def _heights(speeds: Sequence[float], *, least: float) -> tuple[float, ...]:
    """Shares in proportion to `speeds`, none below `least`: who would be gets it, and the others share the rest."""
    raised: set[int] = set()
    while True:
        total = sum(speed for index, speed in enumerate(speeds) if index not in raised)
        rest = 1.0 - least * len(raised)
        shares = [least if index in raised else rest * speed / total for index, speed in enumerate(speeds)]
        low = {index for index, share in enumerate(shares) if share < least}
        if not low or len(raised | low) == len(speeds):
            return tuple(shares)
        raised |= low
