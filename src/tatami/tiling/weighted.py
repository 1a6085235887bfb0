"""Weighted data parallelism: samples in proportion to speeds; and method 1 of the paper: equal shares at all speeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import ClassVar, final

from tatami.cluster import Cluster, Processor
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.planner import AbstractPlanner, best_grid
from tatami.tiling.speeds import at_equal_times
from tatami.workload import Workload


@final
class WeightedPlanner(AbstractPlanner):
    """One replica for each processor (C = N), in the order of the ranks, as wide as it is fast."""

    name: ClassVar[str] = "weighted"
    sized: ClassVar[bool] = True

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:  # noqa: ARG002 - no choice
        return data_parallel(at_equal_times(cluster, workload=workload).processors)


def data_parallel(processors: Sequence[Processor]) -> Layout:
    """A replica for each of `processors`, in their order, as wide as it is fast."""
    total = fsum(processor.speed for processor in processors)
    return Layout(
        replicas=tuple(
            Replica(width=processor.speed / total, processors=(processor.name,), heights=(1.0,)) for processor in processors
        )
    )


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
