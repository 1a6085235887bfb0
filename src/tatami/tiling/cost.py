"""What a layout costs: one interface for every model that prices one, and Eq. 8 of the paper, which counts elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

from tatami.cluster import Cluster
from tatami.tiling.layout import Layout
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The price of one iteration, by what it is paid for.

    Attributes:
        compute: local computation of the rank that takes longest.
        tensor_parallel: sums inside the replica that takes longest, and of batch statistics over all ranks.
        gradients: sums of gradients across replicas.
        unit: "s" for seconds, "elements" for the elements of Eq. 8; costs of different units do not compare.
    """

    compute: float
    tensor_parallel: float
    gradients: float
    unit: Literal["s", "elements"]

    @property
    def total(self) -> float:
        return self.compute + self.tensor_parallel + self.gradients


class AbstractCost(ABC):
    """Prices a layout of a workload on a cluster."""

    @abstractmethod
    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:
        """The cost of one iteration. The cluster has every processor of the layout; those that lie nowhere are idle."""

    def at_least(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> float:  # noqa: ARG002 - nothing is known
        """A lower bound of `price(...).total` that is quicker to find; planners leave out what it rules out."""
        return 0.0

    def compares_machines(self, cluster: Cluster) -> bool:  # noqa: ARG002 - nothing is known
        """Whether prices say who of the cluster should take part: whether what they count for computing and for communication
        is known in the same unit. Otherwise all that can have work take part."""
        return False

    def scale(self, cluster: Cluster) -> float:  # noqa: ARG002 - nothing is known
        """Flop/s of speed 1 on this cluster; 1 where prices are no seconds."""
        return 1.0


@final
class RememberedCost(AbstractCost):
    """`cost`, which prices each layout once: planners that are compared try layouts of each other again.

    It keeps the clusters and workloads that it was asked about, so that no other object can come to have the identity of one.
    """

    def __init__(self, cost: AbstractCost) -> None:
        self.cost = cost
        self._asked: dict[tuple[int, int], tuple[Cluster, Workload, dict[Layout, _Known]]] = {}

    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:
        known = self._known(layout, cluster, workload)
        if known.price is None:
            known.price = self.cost.price(layout, cluster=cluster, workload=workload)
        return known.price

    def at_least(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> float:
        known = self._known(layout, cluster, workload)
        if known.at_least is None:
            known.at_least = self.cost.at_least(layout, cluster=cluster, workload=workload)
        return known.at_least

    def compares_machines(self, cluster: Cluster) -> bool:
        return self.cost.compares_machines(cluster)

    def scale(self, cluster: Cluster) -> float:
        return self.cost.scale(cluster)

    def _known(self, layout: Layout, cluster: Cluster, workload: Workload) -> _Known:
        _, _, layouts = self._asked.setdefault((id(cluster), id(workload)), (cluster, workload, {}))
        return layouts.setdefault(layout, _Known())  # looked up once: to hash a layout is to hash all its names and heights


@dataclass
class _Known:
    """What is known of one layout's price."""

    price: Cost | None = None
    at_least: float | None = None


@final
class PaperCost(AbstractCost):
    """t_comm = 2 l s max_c(s_c (k(c) - 1)) + 2 (l + n) m (C - 1) of Ozawa, Sugaya and Aso, Eq. 8.

    With several blocks, l s and (l + n) m are summed over them; layers outside of blocks add their parameters to the second.
    It counts no computation: SRPM balances that by construction.
    """

    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:  # noqa: ARG002 - elements need no links
        inside, across = eq8_factors(workload)
        deepest = max(replica.width * (len(replica.processors) - 1) for replica in layout.replicas)
        return Cost(
            compute=0.0, tensor_parallel=inside * deepest, gradients=across * (len(layout.replicas) - 1), unit="elements"
        )


def eq8_factors(workload: Workload) -> tuple[int, int]:
    """The factors of Eq. 8: 2 l s of max_c(s_c (k(c) - 1)), and 2 (l + n) m of (C - 1)."""
    return 2 * workload.tensor_parallel_elements, 2 * (workload.gradient_elements + workload.replicated_parameters)
