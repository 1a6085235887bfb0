"""Method 1 of the paper: the same share for every processor, at all speeds."""

from __future__ import annotations

from typing import ClassVar, final

from tatami.cluster import Cluster
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.planner import AbstractPlanner, best_grid
from tatami.workload import Workload


@final
class EvenPlanner(AbstractPlanner):
    """N_DP equal replicas of equal tiles, filled in the order of the ranks; the cheapest N_DP."""

    name: ClassVar[str] = "even"
    sized: ClassVar[bool] = True

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
        names = [processor.name for processor in cluster.processors]

        def build(num_replicas: int) -> Layout:
            depth = len(names) // num_replicas
            heights = (1 / depth,) * depth
            return Layout(
                replicas=tuple(
                    Replica(width=1 / num_replicas, processors=tuple(names[start : start + depth]), heights=heights)
                    for start in range(0, len(names), depth)
                )
            )

        return best_grid(build, cluster=cluster, workload=workload, cost=cost)
