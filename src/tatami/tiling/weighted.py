"""Weighted data parallelism: every processor computes the whole network, on samples in proportion to its speed."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import ClassVar, final

from tatami.cluster import Cluster, Processor
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.planner import AbstractPlanner
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
