"""Method H_rev of the paper: method H, its units split by the speeds of the slowest replica."""

from __future__ import annotations

from typing import ClassVar, final

from tatami.cluster import Cluster
from tatami.tiling.cost import AbstractCost
from tatami.tiling.grid import grid_builder
from tatami.tiling.layout import Layout
from tatami.tiling.planner import AbstractPlanner, ascending, best_grid
from tatami.workload import Workload


@final
class GridRevPlanner(AbstractPlanner):
    """Method H_rev: as method H, and the units are split by the speeds inside the slowest replica, alike in every replica."""

    name: ClassVar[str] = "grid-rev"

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
        build = grid_builder(ascending(cluster), heights=lambda slowest: [processor.speed for processor in slowest])
        return best_grid(build, cluster=cluster, workload=workload, cost=cost)
