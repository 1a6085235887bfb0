"""What a planner is: speeds and a workload in, a layout out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from tatami.cluster import Cluster, Processor
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout
from tatami.tiling.memory import lacking_bytes, squeezed
from tatami.workload import Workload

_ROUNDING = 1e-12
"""Costs that differ by less are equal, whatever was added up first."""
_SURE = 1e-6
"""A cost whose bound is higher than another cost by more is higher: cuts are rounded to 1e-12 of the whole height."""
_MOST_SQUEEZED = 8
"""To make room takes 10 ms for few processors and some tenths of a second for thousands."""


class AbstractPlanner(ABC):
    """Decides who lies where. Every rank plans alone, so the answer depends on the arguments alone, bit for bit.

    `plan` does the rest: it checks the input, cuts the layout to whole samples and units, leaves out who comes out with
    nothing, and prices the result.
    """

    name: ClassVar[str]
    """How `plan` and the command line call it."""

    sized: ClassVar[bool] = False
    """Whether `layout` understands speeds that depend on the size of the tile; a cluster of those is refused elsewhere."""

    chooses_among: ClassVar[tuple[AbstractPlanner, ...]] = ()
    """Planners whose layouts are among those that this one chooses from, if it is for the least cost: what they leave out, and
    processors that cost more by their messages than they bring, is left out where that is cheaper."""

    @abstractmethod
    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
        """A layout of all processors of the cluster.

        Args:
            cluster: the processors, in the order of the ranks, with their speeds.
            workload: what is laid out.
            cost: what to choose by, where the method leaves a choice.
        """


def ascending(cluster: Cluster) -> list[Processor]:
    """The processors by speed, the slowest first; of equals, the lower rank first."""
    return sorted(cluster.processors, key=lambda processor: processor.speed)


def best_grid(build: Callable[[int], Layout], *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
    """The cheapest of `build(N_DP)` over the numbers of columns N_DP that divide the number of processors.

    A grid in which a processor would have no work is taken only where every grid has one; of equals, the fewest
    columns.
    """
    layouts = [build(columns) for columns in range(1, cluster.size + 1) if cluster.size % columns == 0]
    found = cheapest_whole(layouts, cluster=cluster, workload=workload, cost=cost)
    return cheapest(layouts, cluster=cluster, workload=workload, cost=cost) if found is None else found


def cheapest_whole(layouts: Sequence[Layout], *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout | None:
    """Like `cheapest`, among the layouts in which every processor has work; None where there is none.

    They are looked at in the order of what they cost at least, and no more of them once the rest cannot be cheaper: of a
    hundred partitions of ten thousand processors a few are priced.
    """
    if any(processor.memory_bytes is not None for processor in cluster.processors):
        whole = [layout for layout in layouts if not layout.empty(workload)]
        return cheapest(whole, cluster=cluster, workload=workload, cost=cost) if whole else None
    at_least = [cost.at_least(layout, cluster=cluster, workload=workload) for layout in layouts]
    prices: dict[int, float] = {}
    least = math.inf
    for index in sorted(range(len(layouts)), key=at_least.__getitem__):
        if at_least[index] > least * (1 + _SURE):
            break
        if not layouts[index].empty(workload):
            prices[index] = cost.price(layouts[index], cluster=cluster, workload=workload).total
            least = min(least, prices[index])
    best, least = None, math.inf
    for index in sorted(prices):
        if prices[index] < least * (1 - _ROUNDING):
            best, least = layouts[index], prices[index]
    return best


def cheapest(layouts: Sequence[Layout], *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
    """The layout of the least cost; of equals, the first.

    Where processors lack memory for some layouts, these are taken as far as `squeezed` makes room, the cheapest of them first.
    """
    prices = [cost.price(layout, cluster=cluster, workload=workload).total for layout in layouts]
    if any(processor.memory_bytes is not None for processor in cluster.processors):
        found = list(_held(sorted(zip(prices, range(len(prices)), strict=True)), layouts, cluster, workload))
        if found:
            layouts = found
            prices = [cost.price(layout, cluster=cluster, workload=workload).total for layout in layouts]
    best, least = layouts[0], math.inf
    for layout, total in zip(layouts, prices, strict=True):
        if total < least * (1 - _ROUNDING):
            best, least = layout, total
    return best


def _held(
    order: Iterable[tuple[float, int]], layouts: Sequence[Layout], cluster: Cluster, workload: Workload
) -> Iterator[Layout]:
    squeezes = 0
    seen: set[tuple[tuple[str, ...], ...]] = set()
    for _, index in order:
        layout = layouts[index]
        if not lacking_bytes(layout, cluster=cluster, workload=workload):
            yield layout
            continue
        places = tuple(column.processors for column in layout.columns)
        if places in seen or squeezes == _MOST_SQUEEZED:
            continue
        seen.add(places)
        found = squeezed(layout, cluster=cluster, workload=workload)
        if found is not None:
            squeezes += 1
            yield found
