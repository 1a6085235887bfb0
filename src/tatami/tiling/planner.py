"""What a planner is: speeds and a workload in, a layout out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from tatami.cluster import Cluster, Processor
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout
from tatami.tiling.memory import in_fewest_micro_batches
from tatami.tiling.room import with_room
from tatami.tiling.speeds import at_equal_times
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
    """Whether `layout` understands speeds that depend on the size of the tile; others are given those of `at_equal_times`."""

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


def layout_of(planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
    """The planner's layout. One that needs a number for each processor is given the speeds at which all take the same time."""
    seen = cluster if planner.sized else at_equal_times(cluster, workload=workload)
    return planner.layout(cluster=seen, workload=workload, cost=cost)


def ascending(cluster: Cluster) -> list[Processor]:
    """The processors by speed, the slowest first; of equals, the lower rank first."""
    return sorted(cluster.processors, key=lambda processor: processor.speed)


def best_grid(build: Callable[[int], Layout], *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
    """The cheapest of `build(N_DP)` over the numbers of replicas N_DP that divide the number of processors.

    A grid in which a processor would have no work is taken only where every grid has one; of equals, the fewest
    replicas.
    """
    layouts = [build(replicas) for replicas in range(1, cluster.size + 1) if cluster.size % replicas == 0]
    found = cheapest_whole(layouts, cluster=cluster, workload=workload, cost=cost)
    return cheapest(layouts, cluster=cluster, workload=workload, cost=cost) if found is None else found


def cheapest_whole(layouts: Sequence[Layout], *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout | None:
    """Like `cheapest`, among the layouts in which every processor has work; None where there is none.

    They are looked at in the order of what they cost at least, and no more of them once the rest cannot be cheaper: of a
    hundred partitions of ten thousand processors a few are priced.
    """
    at_least = [cost.at_least(layout, cluster=cluster, workload=workload) for layout in layouts]
    order = sorted(range(len(layouts)), key=at_least.__getitem__)
    pairs = ((at_least[index], index) for index in order if not layouts[index].empty(workload))
    return _cheapest(pairs, layouts, cluster=cluster, workload=workload, cost=cost)


def cheapest(layouts: Sequence[Layout], *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
    """The layout of the least cost; of equals, the first.

    Where processors lack memory for some layouts, these are taken as far as `with_room` makes room, the cheapest of them first.
    """
    prices = [cost.price(layout, cluster=cluster, workload=workload).total for layout in layouts]
    order = sorted(zip(prices, range(len(prices)), strict=True))
    found = _cheapest(order, layouts, cluster=cluster, workload=workload, cost=cost)
    assert found is not None
    return found


def _cheapest(
    order: Iterable[tuple[float, int]], layouts: Sequence[Layout], *, cluster: Cluster, workload: Workload, cost: AbstractCost
) -> Layout | None:
    """The cheapest with room in memory, else the first that lacks it.

    Args:
        order: what each of `layouts` costs at least, the least first, and its index.
    """
    found: dict[int, tuple[float, Layout]] = {}
    tight: list[tuple[float, int]] = []
    least = math.inf

    def take(layout: Layout, index: int) -> None:
        nonlocal least
        price = cost.price(layout, cluster=cluster, workload=workload).total
        if index not in found or price < found[index][0]:
            found[index] = (price, layout)
        least = min(least, price)

    for bound, index in order:
        if bound > least * (1 + _SURE):
            break
        held = in_fewest_micro_batches(layouts[index], cluster=cluster, workload=workload)
        if held is not None:
            take(held, index)
        if (held is not layouts[index] and workload.micro_batches is None) or held is None:
            tight.append((bound, index))
    squeezes, seen = 0, set()
    for bound, index in tight:
        places = tuple(replica.processors for replica in layouts[index].replicas)
        if bound > least * (1 + _SURE) or places in seen or squeezes == _MOST_SQUEEZED:
            continue
        seen.add(places)
        held = with_room(layouts[index], cluster=cluster, workload=workload, cost=cost)
        if held is not None:
            squeezes += 1
            take(held, index)
    if not found:
        return layouts[tight[0][1]] if tight else None
    best, least = None, math.inf
    for index in sorted(found):
        price, layout = found[index]
        if price < least * (1 - _ROUNDING):
            best, least = layout, price
    return best
