"""Methods H and H_rev of the paper: grids whose replicas are as wide as their slowest is fast.

H_rev splits the units by the speeds of the slowest replica, H evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum
from typing import ClassVar, final

from tatami.cluster import Cluster, Processor
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.planner import AbstractPlanner, ascending, best_grid
from tatami.workload import Workload


@final
class GridPlanner(AbstractPlanner):
    """Method H: replicas of the same number of processors in ascending order, each as wide as its slowest is fast.

    The units are split evenly; the cheapest N_DP.
    """

    name: ClassVar[str] = "grid"

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
        build = grid_builder(ascending(cluster), heights=lambda slowest: [1.0] * len(slowest))
        return best_grid(build, cluster=cluster, workload=workload, cost=cost)


def grid_builder(
    order: Sequence[Processor], *, heights: Callable[[Sequence[Processor]], Sequence[float]]
) -> Callable[[int], Layout]:
    """Builds the grid of `order` for a number of replicas; `heights` gives all replicas' heights from the slowest replica."""
    names = tuple(processor.name for processor in order)

    def build(num_replicas: int) -> Layout:
        depth = len(order) // num_replicas
        slowest = order[::depth]
        across = fsum(processor.speed for processor in slowest)
        shares = heights(order[:depth])
        down = fsum(shares)
        own = tuple(share / down for share in shares)
        return Layout(
            replicas=tuple(
                Replica(width=processor.speed / across, processors=names[place * depth : (place + 1) * depth], heights=own)
                for place, processor in enumerate(slowest)
            )
        )

    return build


@final
class GridRevPlanner(AbstractPlanner):
    """Method H_rev: as method H, and every replica splits its units by the speeds inside the slowest replica."""

    name: ClassVar[str] = "grid-rev"

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
        build = grid_builder(ascending(cluster), heights=lambda slowest: [processor.speed for processor in slowest])
        return best_grid(build, cluster=cluster, workload=workload, cost=cost)
