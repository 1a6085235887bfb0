"""Predicted seconds of an iteration: computation, and the sums of `tatami.tiling.traffic` over the cluster's own links."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import final

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.tiling.compute import compute_time, scatter
from tatami.tiling.cost import AbstractCost, Cost
from tatami.tiling.layout import Column, Layout
from tatami.tiling.links import LinkGroup, SlowestLink
from tatami.tiling.span import FEW
from tatami.tiling.sum_price import sum_size
from tatami.tiling.traffic import RIDE_ALONG_ELEMENTS, departures, riding_elements, sum_algorithm
from tatami.workload import Workload

Vector = NDArray[np.float64]

FLOP_PER_S = 1e9
"""What a processor of relative speed 1 does in a second where nothing was measured."""
_WORTH_HIDING = 0.01
"""Less than this part of an iteration is not known so well."""
MEASURED_FROM = 1e6
"""Speeds from here on are flop/s: no processor does less, and relative speeds do not go up to a million."""
_LOOKED_AT = 8
"""Of many columns, the widest and the deepest whose sums a lower bound looks at."""


@final
@dataclass(frozen=True, kw_only=True)
class AlphaBetaCost(AbstractCost):
    """Seconds of one iteration: a round of messages costs its link's latency (alpha), and its bytes (beta).

    * compute: the flop of a tile over the speed of its processor, of few samples or units in whole ones. Every sum over
      a column is a meeting: the slowest rank of each block counts. Of ranks whose speeds scatter (`Processor.spread`) one is
      always slow, and all wait for it.
    * vertical: the sums of a column as they are carried out (`sum_algorithm`); the column that takes longest counts.
    * horizontal: every group of units is summed by its C owners: 2 (C - 1) / C of its bytes at its owners' slowest link, in
      one round where C = 2, otherwise two; the processor that takes longest counts. Gradients of layers outside of blocks
      ride along, or are summed by all. With `Workload.bucket_bytes` the wires carry the sums of the last blocks while earlier
      ones compute, and what is not done by then counts.

    Beside the wire, messages cost the processors that send and receive them (`Processor.message_s`), and bytes their copying;
    beside the flop, a block costs its calls (`Processor.call_s`).

    Members of a collective go at the pace of the slowest link among them; members of one host use its local link.

    Attributes:
        flop_per_s: flop/s of a processor of speed 1. None: `FLOP_PER_S`, or 1 where the cluster's speeds are flop/s already
            (all of them from `MEASURED_FROM` on).
    """

    flop_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.flop_per_s is not None and not 0 < self.flop_per_s < float("inf"):
            raise PlanError(f"flop_per_s of speed 1 must be a finite number > 0, not {self.flop_per_s}")

    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:
        links = SlowestLink(cluster)
        compute_s = self._compute_s(layout, cluster=cluster, workload=workload)
        return Cost(
            compute=compute_s * (1 + scatter([cluster.by_name[name] for name in layout.processors])),
            vertical=max(
                _vertical_s(column.processors, width, workload, links)
                for column, width in zip(layout.columns, layout.sample_shares(workload.samples), strict=True)
            ),
            horizontal=_exposed_s(layout, workload, links, compute_s=compute_s),
            unit="s",
        )

    def at_least(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> float:
        links = SlowestLink(cluster)
        compute_s = self._compute_s(layout, cluster=cluster, workload=workload)
        columns = list(zip(layout.columns, layout.sample_shares(workload.samples), strict=True))
        if len(columns) > 2 * _LOOKED_AT:
            # The longest of some is not above the longest of all, and with thousands of columns much quicker to find.
            deepest = heapq.nlargest(_LOOKED_AT, columns, key=lambda pair: len(pair[0].processors))
            columns = [*heapq.nlargest(_LOOKED_AT, columns, key=itemgetter(1)), *deepest]
        vertical_s = max(_vertical_s(column.processors, width, workload, links) for column, width in columns)
        if workload.bucket_bytes is not None:
            return compute_s + vertical_s
        return compute_s + vertical_s + _horizontal_at_least_s(layout, workload, links)

    def _compute_s(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> float:
        scale = self.scale(cluster)
        calls = {each.name: each.call_s * scale for each in cluster.processors} if cluster.calls_known else None
        return compute_time(layout, speeds=cluster.speeds, workload=workload, calls=calls) / scale

    def scale(self, cluster: Cluster) -> float:
        """Flop/s of speed 1 on this cluster."""
        if self.flop_per_s is not None:
            return self.flop_per_s
        return 1.0 if min(cluster.speeds.values()) >= MEASURED_FROM else FLOP_PER_S


def hiding_pays(
    layout: Layout, *, cluster: Cluster, workload: Workload, bucket_bytes: int, cost: AbstractCost | None = None
) -> bool:
    """Whether an iteration is predicted to be shorter where gradients leave while earlier blocks compute.

    Args:
        layout: who lies where.
        cluster: the machines and their links.
        workload: as it is sent without.
        bucket_bytes: of `Workload.bucket_bytes`.
        cost: predicts the time if it is an `AlphaBetaCost`; one with its defaults does otherwise.
    """
    time_cost = cost if isinstance(cost, AlphaBetaCost) else AlphaBetaCost()
    early = replace(workload, bucket_bytes=bucket_bytes)
    if len(layout.columns) == 1 or len(departures(early)) == 1:
        return False
    late_s, early_s = (time_cost.price(layout, cluster=cluster, workload=each).total for each in (workload, early))
    return early_s < late_s * (1 - _WORTH_HIDING)


def _vertical_s(names: tuple[str, ...], width: float, workload: Workload, links: SlowestLink) -> float:
    if len(names) == 1 or not workload.blocks:
        return 0.0
    algorithm = sum_algorithm(list(map(links.host.__getitem__, names)))
    sizes = [
        (count * sums, width * workload.samples * elements / sums)
        for block, count in workload.kinds
        for elements, sums in block.column_sums
    ]
    return _sums_s(algorithm, names, sizes, workload, links)


def _sums_s(
    algorithm: str, names: Sequence[str], sizes: Sequence[tuple[int, float]], workload: Workload, links: SlowestLink
) -> float:
    """Of sums over the same processors: how many there are of so many elements each."""
    element_bytes = workload.element_bytes if algorithm == "native" else workload.wire_bytes
    link = links.among(names)
    message_s = max(map(links.cluster.message_s.__getitem__, names))
    copy_bytes_per_s = min(map(links.cluster.copy_bytes_per_s.__getitem__, names))
    total_s = 0.0
    for count, size in sizes:
        found = sum_size(algorithm, members=len(names), size=size, element_bytes=element_bytes)
        total_s += count * found.seconds(
            size * element_bytes, link=link, message_s=message_s, copy_bytes_per_s=copy_bytes_per_s
        )
    return total_s


def _exposed_s(layout: Layout, workload: Workload, links: SlowestLink, *, compute_s: float) -> float:
    """What of the sums of gradients lies behind the backward pass, and what their messages cost processors wherever it lies."""
    groups = departures(workload)
    if len(groups) == 1:
        return _horizontal_s(layout, workload, links)
    blocks = workload.blocks
    flop = [(1 - each.forward_fraction) * each.flop(units=each.units, samples=1.0) for each in blocks]
    backward_s = compute_s * (sum(flop) / sum(each.flop(units=each.units, samples=1.0) for each in blocks))
    cluster = links.cluster
    quiet = SlowestLink(replace(cluster, processors=tuple(replace(each, message_s=0.0) for each in cluster.processors)))
    messages_s, free_s, alone = 0.0, 0.0, replace(workload, replicated_parameters=0, trained_tensors=0, bucket_bytes=None)
    for group in groups[:-1]:
        own = replace(alone, blocks=tuple(blocks[number] for number in group))
        wire_s = _horizontal_s(layout, own, quiet)
        messages_s += _horizontal_s(layout, own, links) - wire_s
        begins_s = backward_s * sum(flop[min(group) :]) / sum(flop)
        free_s = max(free_s, begins_s) + wire_s
    rest = replace(workload, blocks=tuple(blocks[number] for number in sorted(groups[-1])), bucket_bytes=None)
    return messages_s + max(0.0, free_s - backward_s) + _horizontal_s(layout, rest, links)


def _horizontal_s(layout: Layout, workload: Workload, links: SlowestLink) -> float:
    """The longest of all processors: bytes of the units it owns, a latency for each round, and the replicated layers."""
    num_columns = len(layout.columns)
    if num_columns == 1:
        return 0.0
    cluster, num_ranks = links.cluster, len(layout.processors)
    message_s = np.fromiter(map(cluster.message_s.__getitem__, layout.processors), np.float64, num_ranks)
    copy_bytes_per_s = np.fromiter(map(cluster.copy_bytes_per_s.__getitem__, layout.processors), np.float64, num_ranks)
    among = links.among(layout.processors)
    rounds = 1 if num_columns == 2 or not workload.blocks else 2
    # Without blocks everyone tells everyone.
    wire_s, copied_s = np.zeros(num_ranks), np.zeros(num_ranks)
    latencies_s, neighbours = np.full(num_ranks, among.latency_s), np.full(num_ranks, num_columns - 1)
    if workload.blocks:
        # Blocks of many units are cut at the same heights, those of few each in its own way; the finest of all come last.
        elements: Counter[tuple[bool, int]] = Counter()
        for block, count in workload.kinds:
            fine = block.units >= FEW * layout.deepest
            elements[fine, 0 if fine else block.units] += count * block.parameters
        for (fine, units), each in sorted(elements.items()):
            if not fine:
                Column.cut_together(layout.columns, units)
            cuts = [column.cuts if fine else _cuts(column.unit_sizes(units)) for column in layout.columns]
            tops = np.array([cut for column in cuts for cut in column[:-1]])
            bottoms = np.array([cut for column in cuts for cut in column[1:]])
            # One message carries all blocks, so the messages of the finest count.
            owned, latencies_s, neighbours = _owned(layout, cuts, tops, bottoms, links)
            share = 2 * (num_columns - 1) / num_columns * (each * workload.wire_bytes)
            wire_s += share * owned
            copied_s += 2 * share * (bottoms - tops) / copy_bytes_per_s
    riders = riding_elements(workload, columns=num_columns)
    apart_s, riding_bytes = 0.0, 0.0
    if riders <= RIDE_ALONG_ELEMENTS:
        riding_bytes = (num_columns - 1) * riders * workload.wire_bytes
    else:
        algorithm = sum_algorithm([links.host[name] for name in layout.processors])
        apart_s = _sums_s(algorithm, layout.processors, [(1, riders)], workload, links)
        if not workload.blocks:
            return apart_s
    wire_s = wire_s + riding_bytes / among.bandwidth_bytes_per_s + rounds * latencies_s
    copied_s += 2 * riding_bytes / copy_bytes_per_s
    return apart_s + float(np.max(np.maximum(wire_s, copied_s) + 2 * rounds * neighbours * message_s))


def _horizontal_at_least_s(layout: Layout, workload: Workload, links: SlowestLink) -> float:
    """What the highest tile sends of blocks of many units, over the best links that owners in so many columns can have."""
    num_columns = len(layout.columns)
    if num_columns == 1 or not workload.blocks:
        return _horizontal_s(layout, workload, links)
    elements = sum(count * block.parameters for block, count in workload.kinds if block.units >= FEW * layout.deepest)
    highest = int(layout.heights.argmax())
    height, name = float(layout.heights[highest]), layout.processors[highest]
    cluster = links.cluster
    link = cluster.network if num_columns > cluster.most_on_a_host and not cluster.links else cluster.fastest_link
    rounds = 1 if num_columns == 2 else 2
    size_bytes = 2 * (num_columns - 1) / num_columns * elements * workload.wire_bytes * height
    message_s = cluster.message_s[name]
    return size_bytes / link.bandwidth_bytes_per_s + rounds * link.latency_s + 2 * rounds * (num_columns - 1) * message_s


def _cuts(sizes: Sequence[int]) -> tuple[float, ...]:
    total = sum(sizes)
    return (0.0, *(cut / total for cut in accumulate(sizes)))


def _owned(
    layout: Layout, cuts: Sequence[tuple[float, ...]], tops: Vector, bottoms: Vector, links: SlowestLink
) -> tuple[Vector, Vector, NDArray[np.int64]]:
    """Of each processor: its height over the bandwidth among its units' owners, the longest latency to one, and how many.

    Args:
        layout: who lies where.
        cuts: of each column.
        tops: of all tiles, column by column.
        bottoms: the same.
        links: among the processors.
    """
    inner = sorted((cut, index, below) for index, column in enumerate(cuts) for below, cut in enumerate(column[1:-1], start=1))
    crossings = np.array([cut for cut, _, _ in inner])
    edges = np.array([*sorted({0.0, *(cut for cut, _, _ in inner if cut < 1.0)}), 1.0])
    group_s = [0.0]
    latencies = []
    owners = LinkGroup(links, [column.processors[0] for column in layout.columns])
    passed = 0
    for start, stop in pairwise(edges.tolist()):
        while passed < len(inner) and inner[passed][0] <= start:
            _, index, below = inner[passed]
            owners.replace(layout.columns[index].processors[below - 1], layout.columns[index].processors[below])
            passed += 1
        link = owners.link()
        group_s.append((stop - start) / link.bandwidth_bytes_per_s)
        latencies.append(link.latency_s)
    elapsed = np.array(list(accumulate(group_s)))
    first, last = np.searchsorted(edges, tops), np.searchsorted(edges, bottoms)
    # Of the places between `first` and `last` the greatest: every other one of these ranges is such a tile.
    ranges = np.stack([first, last], axis=1).ravel()
    waits_s = np.where(first < last, np.maximum.reduceat([*latencies, 0.0], ranges)[::2], 0.0)
    # One neighbour in every other column, and one more for each of their cuts inside this tile.
    inside = np.searchsorted(crossings, bottoms) - np.searchsorted(crossings, tops, side="right")
    return elapsed[last] - elapsed[first], waits_s, np.where(first < last, len(cuts) - 1 + inside, 0)
