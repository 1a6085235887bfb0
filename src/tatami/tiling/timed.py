"""The least predicted time: SRPM's partitions for many numbers of replicas, priced with the cluster's own links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import fsum
from typing import ClassVar, final

from tatami.cluster import Cluster, Processor
from tatami.tiling.compute import evened, replica_flop_times
from tatami.tiling.cost import AbstractCost
from tatami.tiling.grid import GridPlanner, GridRevPlanner
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.merge import SrpmMergedPlanner
from tatami.tiling.planner import AbstractPlanner, ascending, cheapest_whole
from tatami.tiling.span import FEW
from tatami.tiling.speeds import at_equal_times, at_tiles
from tatami.tiling.srpm import SrpmPlanner, SrpmTable, srpm_layout, srpm_table
from tatami.tiling.weighted import EvenPlanner, WeightedPlanner, data_parallel
from tatami.workload import Workload

_ROWS = 256
"""Rows of the dynamic program's table, whatever their Eq. 8. Up to 16 replicas all are tried, then steps of an eighth."""
_OTHERS: tuple[AbstractPlanner, ...] = (WeightedPlanner(), EvenPlanner(), GridPlanner(), GridRevPlanner())


@final
class TimedPlanner(AbstractPlanner):
    """The layout that `cost` finds cheapest, among many partitions and the other planners' layouts: no other planner is better.

    Eq. 8 counts elements and knows neither links nor what every rank of a replica repeats. This planner takes the dynamic
    program's partition for many numbers of replicas, in ascending order and host by host (replicas that stay on one host use
    its local link), and moves the cuts so that all tiles compute for the same time.
    """

    name: ClassVar[str] = "timed"
    sized: ClassVar[bool] = True
    chooses_among: ClassVar[tuple[AbstractPlanner, ...]] = (*_OTHERS, SrpmPlanner(), SrpmMergedPlanner())

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
        def tried(plain: Cluster) -> list[Layout]:
            layouts = [other.layout(cluster=plain, workload=workload, cost=cost) for other in _OTHERS]
            if not workload.blocks:
                return [data_parallel(ascending(plain)), *layouts]
            table = srpm_table(plain, workload=workload, least_rows=_ROWS)
            srpm = srpm_layout(plain, workload=workload, table=table)
            return [srpm, SrpmMergedPlanner().merged(srpm), *layouts, *_partitions(plain, workload=workload, table=table)]

        layouts = tried(at_equal_times(cluster, workload=workload))
        found = cheapest_whole(layouts, cluster=cluster, workload=workload, cost=cost)
        if found is not None and cluster.sized:
            # What every rank of a replica repeats makes tiles larger than their areas: once more, at the speeds of these.
            layouts = [found, *tried(at_tiles(cluster, found, workload=workload))]
            found = cheapest_whole(layouts, cluster=cluster, workload=workload, cost=cost)
        if found is None:
            return layouts[0]
        whole = evened(found, cluster=cluster, workload=workload, flop_per_s=cost.scale(cluster))
        if whole is not found:
            found = cheapest_whole([found, whole], cluster=cluster, workload=workload, cost=cost)
        return layouts[0] if found is None else found


def balanced(
    replicas: Sequence[Sequence[Processor]], *, workload: Workload, speeds: Mapping[str, float] | None = None
) -> Layout | None:
    """Widths and heights with which every tile computes for the same time; None where a processor is too slow for any height.

    A tile takes w (F h + G) / v: F flop for the whole area, G for the whole width whatever the height, v its speed. Equal
    times T in a replica of k processors of total speed S give w = T S / (F + k G), and the widths sum to 1. Where units are
    few, a replica whose units do not divide well is narrower than that: widths are as whole units compute.

    Args:
        replicas: who shares one, from top to bottom.
        workload: what is laid out.
        speeds: of all processors by name, if they are at hand.
    """
    per_area, per_width = workload.flop_per_area, workload.flop_per_width
    sums = [fsum([processor.speed for processor in replica]) for replica in replicas]
    rates = [speed / (per_area + len(replica) * per_width) for replica, speed in zip(replicas, sums, strict=True)]
    total = fsum(rates)
    result = []
    for replica, speed, rate in zip(replicas, sums, rates, strict=True):
        flop = per_area + len(replica) * per_width
        heights = tuple([(processor.speed / speed * flop - per_width) / per_area for processor in replica])
        if min(heights) <= 0:
            return None
        result.append(Replica(width=rate / total, processors=tuple([processor.name for processor in replica]), heights=heights))
    layout = Layout(replicas=tuple(result))
    fewest = min(section.units for section in workload.sections)
    if fewest >= FEW * layout.deepest:
        return layout
    own = speeds or {processor.name: processor.speed for replica in replicas for processor in replica}
    rates = [1 / float(flop_time) for flop_time in replica_flop_times(layout, speeds=own, workload=workload)]
    total = fsum(rates)
    return Layout(replicas=tuple(replica.as_wide_as(rate / total) for replica, rate in zip(result, rates, strict=True)))


def _partitions(cluster: Cluster, *, workload: Workload, table: SrpmTable) -> Iterator[Layout]:
    """Partitions of the ascending order, which is that of `table`, and of other orders."""
    orders = [ascending(cluster)]
    by_host = sorted(orders[0], key=lambda processor: processor.host)
    by_memory = sorted(orders[0], key=lambda processor: processor.memory_bytes or 0)
    orders += [order for order in (by_host, by_memory) if order != orders[0]]
    hosts: dict[str, list[Processor]] = {}
    for processor in orders[0]:
        hosts.setdefault(processor.host, []).append(processor)
    # A host's ranks share its memory, so that their sums never cross the network; hosts of any number of ranks, which the
    # dynamic program's replicas of nearly equal speed need not respect.
    by_name = cluster.speeds
    layout = balanced(list(hosts.values()), workload=workload, speeds=by_name) if len(hosts) < cluster.size else None
    if layout is not None:
        yield layout
    for order in orders:
        if order is not orders[0]:
            table = srpm_table(cluster, workload=workload, least_rows=_ROWS, order=order)
        num_replicas = 0
        while num_replicas < len(table.rows):
            num_replicas = min(num_replicas + max(1, num_replicas // 8), len(table.rows))
            sizes = table.partition(num_replicas)
            if sizes is None:
                continue
            stops = accumulate(sizes)
            replicas = [order[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
            layout = balanced(replicas, workload=workload, speeds=by_name)
            if layout is not None:
                yield layout
