"""Eq. 8 of the paper: the communication of a layout, in elements."""

from __future__ import annotations

from typing import final

from tatami.cluster import Cluster
from tatami.tiling.cost import AbstractCost, Cost
from tatami.tiling.layout import Layout
from tatami.workload import Workload


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
