"""What a layout costs: one interface for every model that prices one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from tatami.cluster import Cluster
from tatami.tiling.layout import Layout
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The price of one iteration, by what it is paid for.

    Attributes:
        compute: local computation of the rank that takes longest.
        vertical: sums inside the column that takes longest.
        horizontal: sums across columns.
        unit: "s" for seconds, "elements" for the elements of Eq. 8; costs of different units do not compare.
    """

    compute: float
    vertical: float
    horizontal: float
    unit: Literal["s", "elements"]

    @property
    def total(self) -> float:
        return self.compute + self.vertical + self.horizontal


class AbstractCost(ABC):
    """Prices a layout of a workload on a cluster."""

    @abstractmethod
    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:
        """The cost of one iteration. The cluster has every processor of the layout; those that lie nowhere are idle."""

    def at_least(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> float:  # noqa: ARG002 - nothing is known
        """A lower bound of `price(...).total` that is quicker to find; planners leave out what it rules out."""
        return 0.0
