"""Removal of small groups: cuts of different replicas that nearly meet are moved onto one height."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum
from typing import ClassVar, final

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout
from tatami.tiling.planner import AbstractPlanner
from tatami.tiling.srpm import SrpmPlanner
from tatami.workload import Workload

SMALL_GROUP = 0.06
"""The paper's threshold, of the whole height."""
_LARGEST_MOVE = 0.25
"""Largest move of a cut, as a fraction of the mean height of a tile."""


@final
@dataclass(frozen=True, kw_only=True)
class SrpmMergedPlanner(AbstractPlanner):
    """SRPM, and then the removal of groups thinner than `threshold`: fewer messages for slightly unequal areas.

    The threshold is at most a quarter of the mean height of a tile in the deepest replica. The paper's replicas, of up to four,
    do not notice; in a replica of fifty, 0.06 of the whole would be the height of three tiles.
    """

    name: ClassVar[str] = "srpm-merged"
    sized: ClassVar[bool] = True
    threshold: float = SMALL_GROUP

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
        return self.merged(SrpmPlanner().layout(cluster=cluster, workload=workload, cost=cost))

    def merged(self, layout: Layout) -> Layout:
        """What SRPM lays out, without the thin groups."""
        return remove_small_groups(layout, threshold=min(self.threshold, _LARGEST_MOVE / layout.deepest))


def remove_small_groups(layout: Layout, *, threshold: float = SMALL_GROUP) -> Layout:
    """Move cuts closer than `threshold` onto their mean height, the closest first, so that the groups between them disappear.

    Two cuts of one replica never meet: no tile disappears. A thin group therefore stays where one replica has cuts on both of
    its sides.

    Args:
        layout: of any planner.
        threshold: a fraction of the whole height; 0 moves nothing.

    Raises:
        PlanError: a threshold outside of 0..1.
    """
    if not 0 <= threshold <= 1:
        raise PlanError(f"threshold must be a fraction of the height, 0 to 1, not {threshold}")
    cuts = [list(replica.cuts) for replica in layout.replicas]
    inner = sorted(
        (height, replica, at) for replica, edges in enumerate(cuts) for at, height in enumerate(edges[1:-1], start=1)
    )
    for level in _levels(inner, threshold=threshold):
        height = fsum(inner[index][0] for index in level) / len(level)
        for index in level:
            _, replica, at = inner[index]
            cuts[replica][at] = height
    return Layout(
        replicas=tuple(
            # Cuts with nothing between them may have changed places by a rounding error.
            replace(replica, heights=tuple(max(0.0, stop - start) for start, stop in pairwise(edges)))
            for replica, edges in zip(layout.replicas, cuts, strict=True)
        )
    )


def _levels(inner: list[tuple[float, int, int]], *, threshold: float) -> list[list[int]]:
    """Which cuts come to lie level: indices of `inner`, which is sorted by height.

    Begins with every cut on its own level and joins the two neighbouring levels that are closest, until all neighbours are
    `threshold` apart or share a replica.
    """
    levels: dict[int, list[int]] = {index: [index] for index in range(len(inner))}
    above = {index: index + 1 for index in range(len(inner) - 1)}
    below = {index + 1: index for index in range(len(inner) - 1)}
    mean = [cut[0] for cut in inner]
    replicas = [{cut[1]} for cut in inner]
    near = [(mean[upper] - mean[lower], lower, upper, 1, 1) for lower, upper in above.items()]
    heapq.heapify(near)
    while near:
        distance, lower, upper, lower_size, upper_size = heapq.heappop(near)
        if distance >= threshold:
            break
        # An entry from before one of the two levels grew is out of date; a newer one is in the heap.
        current = lower in levels and upper in levels and (len(levels[lower]), len(levels[upper])) == (lower_size, upper_size)
        if not current or not replicas[lower].isdisjoint(replicas[upper]):
            continue
        levels[lower] += levels.pop(upper)
        replicas[lower] |= replicas[upper]
        mean[lower] = fsum(inner[index][0] for index in levels[lower]) / len(levels[lower])
        if upper in above:
            above[lower] = above[upper]
            below[above[lower]] = lower
        else:
            del above[lower]
        for left, right in ((below.get(lower), lower), (lower, above.get(lower))):
            if left is not None and right is not None:
                entry = (mean[right] - mean[left], left, right, len(levels[left]), len(levels[right]))
                heapq.heappush(near, entry)
    return list(levels.values())
