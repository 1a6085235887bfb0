"""SRPM, static rectangular partitioning mapping: areas as the speeds, replicas by a dynamic program over Eq. 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, inf
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster, Processor
from tatami.errors import PlanError
from tatami.tiling.cost import AbstractCost, PaperCost, eq8_factors
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.memory import in_fewest_micro_batches
from tatami.tiling.planner import AbstractPlanner, ascending, cheapest
from tatami.tiling.speeds import at_equal_times
from tatami.tiling.weighted import data_parallel
from tatami.workload import Workload

Row = NDArray[np.float64]
_ROWS_FOR_MEMORY, _MOST_FOR_MEMORY = 64, 96


@final
class SrpmPlanner(AbstractPlanner):
    """Ozawa, Sugaya and Aso, section 4: ascending order, straight replicas, the number of replicas that minimises Eq. 8."""

    name: ClassVar[str] = "srpm"
    sized: ClassVar[bool] = True

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:  # noqa: ARG002 - Eq. 8 decides
        cluster = at_equal_times(cluster, workload=workload)
        if not workload.blocks:
            return data_parallel(ascending(cluster))
        return srpm_layout(cluster, workload=workload, table=srpm_table(cluster, workload=workload))


def srpm_layout(cluster: Cluster, *, workload: Workload, table: SrpmTable) -> Layout:
    """What `SrpmPlanner` lays out on processors of plain speeds, whose `table` has any number of rows."""
    order = ascending(cluster)
    layout = _layout(order, table.sizes)
    held = in_fewest_micro_batches(layout, cluster=cluster, workload=workload)
    if held is not None:
        return held
    # The best of those partitions for which there is memory; one of more replicas may keep less of every sample.
    table = srpm_table(cluster, workload=workload, least_rows=_ROWS_FOR_MEMORY)
    partitions = map(table.partition, _numbers(len(table.rows)))
    layouts = [layout, *(_layout(order, sizes) for sizes in partitions if sizes is not None)]
    return cheapest(layouts, cluster=cluster, workload=workload, cost=PaperCost())


def _numbers(rows: int) -> list[int]:
    """All numbers of replicas; of very many, some at equal ratios: to see whether one has memory takes as long as its price."""
    if rows <= _MOST_FOR_MEMORY:
        return [*range(1, rows + 1)]
    return sorted({round(rows ** (place / (_MOST_FOR_MEMORY - 1))) for place in range(_MOST_FOR_MEMORY)})


def _layout(order: Sequence[Processor], sizes: Sequence[int]) -> Layout:
    """Replicas of so many processors each, with areas as their speeds."""
    across = fsum(processor.speed for processor in order)
    replicas = []
    stop = 0
    for size in sizes:
        members = order[stop : stop + size]
        stop += size
        total = fsum(processor.speed for processor in members)
        replicas.append(
            Replica(
                width=total / across,
                processors=tuple(processor.name for processor in members),
                heights=tuple(processor.speed / total for processor in members),
            )
        )
    return Layout(replicas=tuple(replicas))


@dataclass(frozen=True, kw_only=True)
class SrpmTable:
    """The dynamic program's table; `str` of it reads like the paper's.

    Attributes:
        abilities: p_i in the order of the partition (ascending, as the paper has it), summing to 1.
        rows: row C - 1 holds t(C, q) for q = 0..N (infinite where q processors cannot fill C replicas): the least possible
            max over C replicas of s_c (k(c) - 1), using the first q processors.
        t_comm: Eq. 8 with t(C, N), in elements, for every row.
        sizes: k(c) of the best partition, from the slowest replica.
        depth: the most processors that a replica may have.
    """

    abilities: tuple[float, ...]
    rows: tuple[Row, ...]
    t_comm: tuple[float, ...]
    sizes: tuple[int, ...]
    depth: int

    def partition(self, replicas: int) -> tuple[int, ...] | None:
        """k(c) of the best partition into this many replicas, from the first replica; None where there is none."""
        rows = self.rows[:replicas]
        return _sizes(_sums(self.abilities), rows, self.depth) if rows[-1][-1] < inf else None

    def t(self, replicas: int, processors: int) -> float:
        """t(C, q).

        Raises:
            PlanError: more replicas than the program looked at, or more than processors.
        """
        if not 1 <= replicas <= min(len(self.rows), processors) or processors > len(self.abilities):
            raise PlanError(
                f"t({replicas}, {processors}) is not in the table: it has C = 1..{len(self.rows)} and "
                f"q = C..{len(self.abilities)}"
            )
        return float(self.rows[replicas - 1][processors])

    def __str__(self) -> str:
        lines = [f"| C | t(C, q) for q = C..{len(self.abilities)} | t_comm |", "|---|---|---|"]
        for replicas, (row, elements) in enumerate(zip(self.rows, self.t_comm, strict=True), start=1):
            values = " ".join(f"{value:.2f}" for value in row[replicas:])
            mark = " (the minimum)" if replicas == len(self.sizes) else ""
            lines.append(f"| {replicas} | {values} | {elements:.1f}{mark} |")
        return "\n".join(lines)


def srpm_table(
    cluster: Cluster, *, workload: Workload, least_rows: int = 1, order: Sequence[Processor] | None = None
) -> SrpmTable:
    """Fill the table t(C, q) and choose the number of replicas.

    t(C, q) = min over q' in [C - 1, q - 1] of max((p_q'+1 + ... + p_q) (q - q' - 1), t(C - 1, q'))

    The first term falls with q' and the second rises, so the minimum lies where they cross: a binary search for all q at
    once, O(N log N) a row. Replicas of more processors than there are units, and more replicas than samples, are not
    considered: a processor would have no work.

    Args:
        cluster: the processors, by their speeds.
        workload: how many samples and units there are.
        least_rows: fill so many rows even if they cannot hold the minimum; the table otherwise ends where the second term
            of Eq. 8 alone exceeds the best so far. N fills it whole.
        order: the order in which processors fill the replicas; ascending where None.

    Raises:
        PlanError: more processors than samples times units.
    """
    speeds = [processor.speed for processor in (ascending(cluster) if order is None else order)]
    total = fsum(speeds)
    abilities = tuple(speed / total for speed in speeds)
    inside, across = eq8_factors(workload)
    depth = workload.units
    sums = _sums(abilities)
    rows: list[Row] = []
    t_comm: list[float] = []
    best = inf
    crossing = np.zeros(len(sums), dtype=np.int64)
    for replicas in range(1, min(len(speeds), workload.samples) + 1):
        if across * (replicas - 1) >= best and replicas > least_rows:
            break
        if replicas == 1:
            row = _replica_cost(sums, 0, np.arange(len(sums)), depth)
            row[0] = inf
        else:
            row, crossing = _next_row(sums, replicas, rows[-1], crossing, depth)
        rows.append(row)
        t_comm.append(inside * float(row[-1]) + across * (replicas - 1))
        best = min(best, t_comm[-1])
    if best == inf:
        raise PlanError(
            f"{len(speeds)} processors are too many for {workload.samples} samples x {depth} units: "
            "give each at least one of both"
        )
    return SrpmTable(
        abilities=abilities,
        rows=tuple(rows),
        t_comm=tuple(t_comm),
        sizes=_sizes(sums, rows[: t_comm.index(best) + 1], depth),
        depth=depth,
    )


def _sums(abilities: Sequence[float]) -> Row:
    return np.concatenate([[0.0], np.cumsum(np.asarray(abilities, dtype=np.float64))])


def _replica_cost(sums: Row, start: int | NDArray[np.int64], stop: int | NDArray[np.int64], depth: int) -> Row:
    """s_c (k(c) - 1) of a replica of processors start..stop-1; infinite where it is deeper than `depth`."""
    members = np.asarray(stop) - start
    return np.where(members > depth, inf, (sums[stop] - sums[start]) * (members - 1))


def _next_row(
    sums: Row, replicas: int, previous: Row, crossing: NDArray[np.int64], depth: int
) -> tuple[Row, NDArray[np.int64]]:
    """t(C, .) from t(C - 1, .), and for every q the least q' with t(C - 1, q') >= the cost of the last replica.

    `crossing` is that of the row before: it only ever moves to the right from row to row.
    """
    q = np.arange(replicas, len(sums))
    low = np.maximum(crossing[replicas:], replicas - 1)
    high = q - 1
    # From row to row it moves by about q / C^2, so it is mostly near; what is left is searched by halves.
    middle = np.minimum(low + 2 * q // replicas**2 + 1, high)
    going = np.arange(len(q))
    while len(going):
        right = previous[middle] < _replica_cost(sums, middle, q[going], depth)
        low[going] = np.where(right, np.minimum(middle + 1, high[going]), low[going])
        high[going] = np.where(right, high[going], middle)
        going = going[low[going] < high[going]]
        middle = (low[going] + high[going]) // 2
    # Example: speeds 1, 2, 3, 4, so p = .1, .2, .3, .4, and C = 2, q = 4. For q' = 1, 2, 3 the last replica costs 1.8, 0.7, 0
    # and the first one, t(1, q'), 0, 0.3, 1.2. At q' = 3 the second is the larger one for the first time, so that `low` is 3,
    # and the least maximum is there (1.2) or just before, at q' = 2: max(0.7, 0.3) = 0.7 = t(2, 4).
    left = np.maximum(low - 1, replicas - 1)
    before = np.where(low > replicas - 1, np.maximum(_replica_cost(sums, left, q, depth), previous[left]), inf)
    row = np.full(len(sums), inf)
    row[replicas:] = np.minimum(before, np.maximum(_replica_cost(sums, low, q, depth), previous[low]))
    moved = np.zeros(len(sums), dtype=np.int64)
    moved[replicas:] = low
    return row, moved


def _sizes(sums: Row, rows: Sequence[Row], depth: int) -> tuple[int, ...]:
    """k(c) of a partition that reaches the last row's t(C, N): from the last replica back, the first q' that gives t(C, q)."""
    stops = [len(sums) - 1]
    for replicas in range(len(rows), 1, -1):
        stop = stops[-1]
        start = max(replicas - 1, stop - depth)  # a replica of more than `depth` has no end
        costs = np.maximum(
            (sums[stop] - sums[start:stop]) * np.arange(stop - start - 1, -1, -1), rows[replicas - 2][start:stop]
        )
        stops.append(start + int(np.argmin(costs)))
    return tuple(stop - start for start, stop in pairwise([0, *reversed(stops)]))
