"""Predicted seconds of an iteration: computation, and the sums of `tatami.tiling.traffic` over the cluster's own links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from tatami.cluster import Cluster, Link
from tatami.errors import PlanError
from tatami.tiling.compute import compute_time
from tatami.tiling.cost import AbstractCost, Cost
from tatami.tiling.layout import Layout
from tatami.tiling.links import LinkGroup, SlowestLink
from tatami.tiling.span import FEW
from tatami.tiling.sum_price import sum_size
from tatami.tiling.traffic import RIDE_ALONG_ELEMENTS, sum_algorithm, told_elements
from tatami.workload import Workload

FLOP_PER_S = 1e9
"""What a processor of relative speed 1 does in a second where nothing was measured."""
MEASURED_FROM = 1e6
"""Speeds from here on are flop/s: no processor does less, and nobody calls one a million times as fast as another."""


@final
@dataclass(frozen=True, kw_only=True)
class AlphaBetaCost(AbstractCost):
    """Seconds of one iteration: a round of messages costs its link's latency (alpha), and its bytes (beta).

    compute: the flop of a tile over the speed of its processor, of few samples or units in whole ones. Every sum over
        a column is a meeting: the slowest rank of each block counts.
    vertical: the sums of a column as they are carried out (`sum_algorithm`); the column that takes longest counts.
    horizontal: every group of units is summed by its C owners: 2 (C - 1) / C of its bytes at its owners' slowest link, in
        one round where C = 2, otherwise two; the processor that takes longest counts. Gradients of layers outside of blocks
        ride along, or are summed by all.

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
        return Cost(
            compute=compute_time(layout, speeds=cluster.speeds, workload=workload) / self.scale(cluster),
            vertical=max(
                _vertical_s(column.processors, width, workload, links)
                for column, width in zip(layout.columns, layout.sample_shares(workload.samples), strict=True)
            ),
            horizontal=_horizontal_s(layout, workload, links),
            unit="s",
        )

    def scale(self, cluster: Cluster) -> float:
        """Flop/s of speed 1 on this cluster."""
        if self.flop_per_s is not None:
            return self.flop_per_s
        return 1.0 if min(processor.speed for processor in cluster.processors) >= MEASURED_FROM else FLOP_PER_S


def _vertical_s(names: tuple[str, ...], width: float, workload: Workload, links: SlowestLink) -> float:
    members = len(names)
    if members == 1 or not workload.blocks:
        return 0.0
    link = links.among(names)
    algorithm = sum_algorithm([links.host[name] for name in names])
    total_s = 0.0
    for block, count in workload.kinds:
        for elements, sums in block.column_sums:
            size = width * workload.samples * elements / sums
            total_s += count * sums * _sum_s(algorithm, members, size, workload.element_bytes, link)
    return total_s


def _sum_s(algorithm: str, members: int, size: float, element_bytes: int, link: Link) -> float:
    found = sum_size(algorithm, members=members, size=size, element_bytes=element_bytes)
    return found.seconds(size * element_bytes, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s)


def _horizontal_s(layout: Layout, workload: Workload, links: SlowestLink) -> float:
    """The longest of all processors: bytes of the units it owns, a latency for each round, and the replicated layers."""
    num_columns = len(layout.columns)
    if num_columns == 1:
        return 0.0
    longest = 0.0
    if workload.blocks:
        # Blocks of many units are cut at the same heights, those of few each in its own way; the finest of all come last.
        elements: Counter[tuple[bool, int]] = Counter()
        deepest = max(len(column.processors) for column in layout.columns)
        for block, count in workload.kinds:
            fine = block.units >= FEW * deepest
            elements[fine, 0 if fine else block.units] += count * block.parameters
        spent_s = [0.0] * len(layout.processors)
        for (fine, units), each in sorted(elements.items()):
            cuts = [column.cuts if fine else _cuts(column.unit_sizes(units)) for column in layout.columns]
            owned, latencies_s = _owned(layout, cuts, links)
            share = 2 * (num_columns - 1) / num_columns * (each * workload.element_bytes)
            spent_s = [spent + share * own_s for spent, own_s in zip(spent_s, owned, strict=True)]
        # One message carries all blocks, so the messages of the finest count.
        rounds = 1 if num_columns == 2 else 2
        longest = max(spent + rounds * latency_s for spent, latency_s in zip(spent_s, latencies_s, strict=True))
    riders = workload.replicated_parameters + told_elements(workload.trained_tensors, columns=num_columns)
    link = links.among(layout.processors)
    if riders <= RIDE_ALONG_ELEMENTS:
        longest += (num_columns - 1) * riders * workload.element_bytes / link.bandwidth_bytes_per_s
        return longest if workload.blocks else longest + link.latency_s
    algorithm = sum_algorithm([links.host[name] for name in layout.processors])
    return longest + _sum_s(algorithm, len(layout.processors), riders, workload.element_bytes, link)


def _cuts(sizes: Sequence[int]) -> tuple[float, ...]:
    total = sum(sizes)
    return (0.0, *(cut / total for cut in accumulate(sizes)))


def _owned(layout: Layout, cuts: Sequence[tuple[float, ...]], links: SlowestLink) -> tuple[list[float], list[float]]:
    """Of each processor: its height over the bandwidth among its units' owners, and the longest latency to one of them."""
    inner = sorted((cut, index, below) for index, column in enumerate(cuts) for below, cut in enumerate(column[1:-1], start=1))
    crossings = [cut for cut, _, _ in inner]
    edges = [*sorted({0.0, *(cut for cut in crossings if cut < 1.0)}), 1.0]
    group_s = [0.0]
    latencies = []
    owners = LinkGroup(links, [column.processors[0] for column in layout.columns])
    passed = 0
    for start, stop in pairwise(edges):
        while passed < len(inner) and inner[passed][0] <= start:
            _, index, below = inner[passed]
            owners.replace(layout.columns[index].processors[below - 1], layout.columns[index].processors[below])
            passed += 1
        link = owners.link()
        group_s.append((stop - start) / link.bandwidth_bytes_per_s)
        latencies.append(link.latency_s)
    elapsed = list(accumulate(group_s))
    position = {edge: index for index, edge in enumerate(edges)}
    owned, waits_s = [], []
    for column in cuts:
        for top, bottom in pairwise(column):
            first, last = position[top], position[bottom]
            owned.append(elapsed[last] - elapsed[first])
            waits_s.append(max(latencies[first:last], default=0.0))
    return owned, waits_s
