"""Predicted seconds of an iteration: computation, and bandwidth-optimal collectives over the cluster's own links."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.tiling.compute import compute_time
from tatami.tiling.cost import AbstractCost, Cost
from tatami.tiling.layout import Layout
from tatami.tiling.links import LinkGroup, SlowestLink
from tatami.tiling.span import FEW
from tatami.workload import Workload

FLOP_PER_S = 1e9
"""What a processor of relative speed 1 does in a second where nothing was measured."""
MEASURED_FROM = 1e6
"""Speeds from here on are flop/s: no processor does less, and nobody calls one a million times as fast as another."""


@final
@dataclass(frozen=True, kw_only=True)
class AlphaBetaCost(AbstractCost):
    """Seconds of one iteration: a message costs its link's latency (alpha) and its bytes (beta).

    compute: the flop of a tile over the speed of its processor, of few samples or units in whole ones. Every sum over
        a column is a meeting: the slowest rank of each block counts.
    vertical: an all-reduce of k members in 2 (k - 1) steps of 1/k of the bytes, for each exchange of the column; the column
        that takes longest counts.
    horizontal: every group of units is summed by its C owners: 2 (C - 1) / C of its bytes at its owners' slowest link, and
        one latency for each message (one to each neighbour in a phase; one phase where C = 2, otherwise two); the processor
        that takes longest counts. Layers outside of blocks are summed by C members in 2 (C - 1) steps.

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
    chunk_bytes = width * workload.vertical_bytes / members
    return 2 * (members - 1) * (workload.vertical_exchanges * link.latency_s + chunk_bytes / link.bandwidth_bytes_per_s)


def _horizontal_s(layout: Layout, workload: Workload, links: SlowestLink) -> float:
    """The longest of all processors: bytes of the units it owns, a latency for each message, and the replicated layers."""
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
        phases = 1 if num_columns == 2 else 2
        longest = max(spent + phases * latency_s for spent, latency_s in zip(spent_s, latencies_s, strict=True))
    if workload.replicated_bytes:
        link = links.among(layout.processors)
        longest += 2 * (num_columns - 1) * link.transfer_s(workload.replicated_bytes / num_columns)
    return longest


def _cuts(sizes: Sequence[int]) -> tuple[float, ...]:
    total = sum(sizes)
    return (0.0, *(cut / total for cut in accumulate(sizes)))


def _owned(layout: Layout, cuts: Sequence[tuple[float, ...]], links: SlowestLink) -> tuple[list[float], list[float]]:
    """Of each processor: its height over the bandwidth among its units' owners, and the latencies of its messages."""
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
            # One neighbour in every other column, and one more for each of their cuts inside this tile.
            neighbours = len(cuts) - 1 + bisect_left(crossings, bottom) - bisect_right(crossings, top) if first < last else 0
            owned.append(elapsed[last] - elapsed[first])
            waits_s.append(neighbours * max(latencies[first:last], default=0.0))
    return owned, waits_s
