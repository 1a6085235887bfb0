"""Weighted data parallel: everybody computes the whole network, on samples in proportion to its speed."""

from __future__ import annotations

from math import fsum
from typing import ClassVar, final

from tatami.cluster import Cluster
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Column, Layout
from tatami.tiling.planner import AbstractPlanner
from tatami.workload import Workload


@final
class WeightedPlanner(AbstractPlanner):
    """One column for each processor (C = N), in the order of the ranks, as wide as it is fast."""

    name: ClassVar[str] = "weighted"

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:  # noqa: ARG002 - no choice
        total = fsum(processor.speed for processor in cluster.processors)
        return Layout(
            columns=tuple(
                Column(width=processor.speed / total, processors=(processor.name,), heights=(1.0,))
                for processor in cluster.processors
            )
        )
