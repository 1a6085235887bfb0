"""Predicted seconds of an iteration: computation, and the sums of `tatami.tiling.traffic` over the cluster's own links."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum
from operator import itemgetter
from typing import final

import numpy as np

from tatami.cluster import Cluster
from tatami.cluster.speed_table import MEASURED_FROM
from tatami.errors import PlanError
from tatami.tiling.compute import compute_s, idle_s, scatter
from tatami.tiling.cost import AbstractCost, Cost
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.links import LinkGroup, SlowestLink
from tatami.tiling.overlap import FASTEST_CPU_FLOP_PER_S, buckets_of, late_share, not_hidden_s
from tatami.tiling.span import FEW
from tatami.tiling.sum_price import sum_size
from tatami.tiling.summing import summing_shares, transfer_rates
from tatami.tiling.traffic import (
    RIDE_ALONG_ELEMENTS,
    STATISTICS_BYTES,
    is_one_vector,
    riding_elements,
    sum_algorithm,
    sums_statistics,
)
from tatami.workload import Workload

FLOP_PER_S = 1e9
"""What a processor of relative speed 1 does in a second where nothing was measured."""
_NOTHING = 1e-9
"""Rounding of shares that were added and subtracted."""
_LOOKED_AT = 8
"""Number of the widest and of the deepest replicas whose sums a lower bound looks at."""


@final
@dataclass(frozen=True, kw_only=True)
class AlphaBetaCost(AbstractCost):
    """Seconds of one iteration: a round of messages costs its link's latency (alpha), and its bytes (beta).

    * compute: the flop of a tile over the speed of its processor, of few samples or units in whole ones. Every sum over
      a replica is a meeting: the slowest rank of each block counts. Of ranks whose speeds scatter (`Processor.spread`) one is
      always slow, and all wait for it.
    * tensor_parallel: the sums of a replica as they are carried out (`sum_algorithm`); the replica that takes longest counts.
      So are the sums of batch statistics over all ranks, those without a tile included (`Workload.batch_statistics`).
    * gradients: every group of units is summed by its C owners: 2 (C - 1) / C of its bytes at its owners' slowest link, in
      one round where C = 2, otherwise two; the processor that takes longest counts. Where bytes cost some processors more
      than others, those sum less (`summing_shares`). Gradients of layers outside of blocks ride along, or are summed by all.
      Where they leave in buckets while the backward pass computes, what it does not hide counts (`tatami.tiling.overlap`).

    A replica that recomputes has the forward pass of its layers, with its sums, twice.

    A replica of several micro-batches has the calls and the sums inside of it once for each, over fewer samples; gradients are
    summed across replicas once.

    Beside the wire, messages cost the processors that send and receive them (`Processor.message_s`), and bytes their copying;
    beside the flop, blocks and iterations cost their calls (`Processor.call_s`, `Processor.step_s`). A processor without a tile
    has an iteration's all the same, and the others wait for it.

    Members of a collective go at the pace of the slowest link among them; members of one host use its local link.

    Attributes:
        flop_per_s: flop/s of a processor of speed 1. None: `FLOP_PER_S`, or 1 where the cluster's speeds are flop/s already
            (the fastest is at least `MEASURED_FROM`).
    """

    flop_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.flop_per_s is not None and not 0 < self.flop_per_s < float("inf"):
            raise PlanError(f"flop_per_s of speed 1 must be a finite number > 0, not {self.flop_per_s}")

    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:
        links = SlowestLink(cluster)
        exact_s = compute_s(layout, cluster=cluster, workload=workload, flop_per_s=self.scale(cluster))
        noisy_s = exact_s * (1 + scatter([cluster.by_name[name] for name in layout.processors]))
        buckets = self.buckets(layout, cluster=cluster, workload=workload)
        tensor_parallel_s = max(replica_sums_s(layout, workload, links))
        return Cost(
            compute=max(noisy_s, idle_s(layout, cluster=cluster) - tensor_parallel_s),
            tensor_parallel=tensor_parallel_s + statistics_s(layout, workload, links),
            gradients=max(gradient_sums_s(layout, workload, links, buckets=buckets, compute_s=noisy_s)),
            unit="s",
        )

    def at_least(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> float:
        links = SlowestLink(cluster)
        exact_s = compute_s(layout, cluster=cluster, workload=workload, flop_per_s=self.scale(cluster))
        replicas = list(zip(layout.replicas, layout.sample_shares(workload.samples), strict=True))
        if len(replicas) > 2 * _LOOKED_AT:
            # The longest of some is not above the longest of all, and with thousands of replicas much quicker to find.
            deepest = heapq.nlargest(_LOOKED_AT, replicas, key=lambda pair: len(pair[0].processors))
            replicas = [*heapq.nlargest(_LOOKED_AT, replicas, key=itemgetter(1)), *deepest]
        tensor_parallel_s = max(_tensor_parallel_s(replica, width, workload, links) for replica, width in replicas)
        before_s = max(exact_s + tensor_parallel_s, idle_s(layout, cluster=cluster)) + statistics_s(layout, workload, links)
        gradients_s = _gradients_at_least_s(layout, workload, links)
        buckets = self.buckets(layout, cluster=cluster, workload=workload)
        return before_s + not_hidden_s(
            gradients_s, buckets=buckets, late=late_share(workload), backward_s=workload.backward_fraction * exact_s
        )

    def compares_machines(self, cluster: Cluster) -> bool:
        """Whether speeds are flop/s, or it was said how many flop/s they stand for: of relative speeds the seconds of computing
        are a guess, and links known in seconds are no reason then to leave a machine idle that was asked for."""
        return self.flop_per_s is not None or _are_flop_per_s(cluster)

    def buckets(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> int:
        """In how many gradients leave while the backward pass computes; 1 where they leave after it."""
        if not self.may_hide_sums(cluster, workload=workload):
            return 1
        return buckets_of([len(each.processors) for each in layout.replicas], cluster=cluster, workload=workload)

    def may_hide_sums(self, cluster: Cluster, *, workload: Workload) -> bool:
        """Whether sums are priced that hide behind computing: not on GPUs, and not where its seconds are a guess."""
        known = workload.overlaps_sums and self.compares_machines(cluster)
        return known and max(cluster.speeds.values()) * self.scale(cluster) <= FASTEST_CPU_FLOP_PER_S

    def scale(self, cluster: Cluster) -> float:
        """Flop/s of speed 1 on this cluster."""
        if self.flop_per_s is not None:
            return self.flop_per_s
        return 1.0 if _are_flop_per_s(cluster) else FLOP_PER_S


def _are_flop_per_s(cluster: Cluster) -> bool:
    return max(cluster.speeds.values()) >= MEASURED_FROM


def _tensor_parallel_s(replica: Replica, width: float, workload: Workload, links: SlowestLink) -> float:
    names, micro_batches = replica.processors, replica.micro_batches
    if len(names) == 1 or not workload.blocks:
        return 0.0
    algorithm = sum_algorithm(list(map(links.host.__getitem__, names)))
    sizes = [
        (micro_batches * count * sums, width * workload.samples * elements / sums / micro_batches)
        for block, count in workload.kinds
        for elements, sums in block.replica_sums
    ]
    sizes += [
        (micro_batches * count * sums, width * workload.samples * elements / sums / micro_batches)
        for block, count in (workload.recomputed_kinds if replica.recomputes else ())
        for elements, sums in block.replica_sums[:1]
    ]
    return sums_s(algorithm, names, sizes, workload, links)


def statistics_s(layout: Layout, workload: Workload, links: SlowestLink) -> float:
    """The sums of batch statistics, forward and backward."""
    names = tuple(links.cluster.by_name)
    if not workload.batch_statistics or not sums_statistics(
        replicas=len(layout.replicas), tiles=len(layout.processors), ranks=len(names)
    ):
        return 0.0
    algorithm = sum_algorithm([links.host[name] for name in names])
    times = 3 if layout.recomputes else 2
    sizes = [(times * count, float(elements)) for elements, count in Counter(workload.batch_statistics).items()]
    return sums_s(algorithm, names, sizes, workload, links, element_bytes=STATISTICS_BYTES)


def sums_s(
    algorithm: str,
    names: Sequence[str],
    sizes: Sequence[tuple[int, float]],
    workload: Workload,
    links: SlowestLink,
    *,
    element_bytes: int | None = None,
) -> float:
    """Seconds of sums over the same processors, given how many there are of each number of elements."""
    if element_bytes is None:
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


def replica_sums_s(layout: Layout, workload: Workload, links: SlowestLink) -> list[float]:
    """The sums inside of each replica, in an iteration."""
    return [
        _tensor_parallel_s(replica, width, workload, links)
        for replica, width in zip(layout.replicas, layout.sample_shares(workload.samples), strict=True)
    ]


def gradient_sums_s(
    layout: Layout, workload: Workload, links: SlowestLink, *, buckets: int = 1, compute_s: float = 0.0
) -> list[float]:
    """The sums across replicas of each processor: bytes of its units, a latency for each round, and replicated layers.

    Args:
        buckets: in how many gradients leave while the backward pass computes, which hides what the wires take, and neither
            messages nor copying; 1: after it.
        compute_s: forward and backward pass.
    """
    backward_s = workload.backward_fraction * compute_s / max(replica.micro_batches for replica in layout.replicas)
    late = late_share(workload)
    num_replicas = len(layout.replicas)
    if num_replicas == 1:
        return [_to_idle_s(layout, workload, links)] * len(layout.processors)
    own = [links.cluster.by_name[name] for name in layout.processors]
    riders = riding_elements(workload, replicas=num_replicas)
    ranks, num_blocks = len(links.cluster.processors), len(workload.blocks)
    whole = is_one_vector(replicas=num_replicas, tiles=len(own), ranks=ranks, blocks=num_blocks)
    rounds = 1 if num_replicas == 2 or not (workload.blocks or whole) else 2
    heights = layout.heights.tolist()
    shares = summing_shares(heights, layout.processors, replicas=num_replicas, rates=transfer_rates(links.cluster))
    # Where nothing is cut, everyone tells everyone.
    wire_s, copied_s = [0.0] * len(own), [0.0] * len(own)
    latencies_s, neighbours = [links.among(layout.processors).latency_s] * len(own), [num_replicas - 1] * len(own)
    if workload.blocks or whole:
        # Blocks of many units are cut at the same heights, those of few each in its own way; the finest of all come last.
        elements: Counter[tuple[bool, int]] = Counter()
        if whole:
            elements[True, 0] = workload.gradient_elements + riders
            riders = 0
        for block, count in workload.kinds if not whole else ():
            fine = block.units >= FEW * layout.deepest
            elements[fine, 0 if fine else block.units] += count * block.parameters
        for (fine, units), each in sorted(elements.items()):
            if not fine:
                Replica.cut_together(layout.replicas, units)
            cuts = [replica.cuts if fine else _cuts(replica.unit_sizes(units)) for replica in layout.replicas]
            # One message carries all blocks, so the messages of the finest count.
            owned, traveled, latencies_s, neighbours = _owned(layout, cuts, links, shares)
            size_bytes = each * workload.wire_bytes
            wire_s = [spent + size_bytes * own_s for spent, own_s in zip(wire_s, owned, strict=True)]
            copied_s = [
                spent + 2 * size_bytes * part / processor.copy_bytes_per_s
                for spent, part, processor in zip(copied_s, traveled, own, strict=True)
            ]
    apart_s, riding_bytes = 0.0, 0.0
    if riders <= RIDE_ALONG_ELEMENTS:
        riding_bytes = (num_replicas - 1) * riders * workload.wire_bytes
    else:
        names = tuple(links.cluster.by_name)  # those without a tile take part
        apart_s = sums_s(sum_algorithm([links.host[name] for name in names]), names, [(1, riders)], workload, links)
        if not workload.blocks:
            return [not_hidden_s(apart_s, buckets=buckets, late=late, backward_s=backward_s)] * len(own)
    riding_s = riding_bytes / links.among(layout.processors).bandwidth_bytes_per_s
    return [
        apart_s
        + max(
            not_hidden_s(wire + riding_s + buckets * rounds * latency_s, buckets=buckets, late=late, backward_s=backward_s),
            copied + 2 * riding_bytes / processor.copy_bytes_per_s,
        )
        + 2 * buckets * rounds * messages * processor.message_s
        for wire, copied, latency_s, messages, processor in zip(wire_s, copied_s, latencies_s, neighbours, own, strict=True)
    ]


def _to_idle_s(layout: Layout, workload: Workload, links: SlowestLink) -> float:
    """What it takes the ranks without a tile, if there are any, to hear the gradients of what every rank repeats from the only
    replica: they keep those weights."""
    names = tuple(links.cluster.by_name)
    if len(names) == len(layout.processors):
        return 0.0
    riders = riding_elements(workload, replicas=1)
    if riders > RIDE_ALONG_ELEMENTS:
        return sums_s(sum_algorithm([links.host[name] for name in names]), names, [(1, riders)], workload, links)
    link, idle = links.among(names), len(names) - len(layout.processors)
    message_s = links.cluster.message_s[layout.processors[0]]
    return link.latency_s + idle * (riders * workload.wire_bytes / link.bandwidth_bytes_per_s + message_s)


def _gradients_at_least_s(layout: Layout, workload: Workload, links: SlowestLink) -> float:
    """What the highest tile sends of blocks of many units, over the best links that owners in so many replicas can have."""
    num_replicas = len(layout.replicas)
    if num_replicas == 1 or not workload.blocks:
        return max(gradient_sums_s(layout, workload, links))
    elements = sum(count * block.parameters for block, count in workload.kinds if block.units >= FEW * layout.deepest)
    highest = int(layout.heights.argmax())
    height, name = float(layout.heights[highest]), layout.processors[highest]
    cluster = links.cluster
    crosses = num_replicas > cluster.most_on_a_host and not cluster.links
    link = cluster.link_of(cluster.host_of[name]) if crosses else cluster.fastest_link
    rounds = 1 if num_replicas == 2 else 2
    # Where processors sum what suits them, one may sum nothing, and only send what it has once.
    parts = 2 * (num_replicas - 1) / num_replicas if transfer_rates(cluster) is None else 1.0
    size_bytes = parts * elements * workload.wire_bytes * height
    message_s = cluster.message_s[name]
    return size_bytes / link.bandwidth_bytes_per_s + rounds * link.latency_s + 2 * rounds * (num_replicas - 1) * message_s


def _cuts(sizes: Sequence[int]) -> tuple[float, ...]:
    total = sum(sizes)
    return (0.0, *(cut / total for cut in accumulate(sizes)))


def _owned(
    layout: Layout, cuts: Sequence[tuple[float, ...]], links: SlowestLink, shares: Mapping[str, float] | None
) -> tuple[list[float], list[float], list[float], list[int]]:
    """What each processor sends, in seconds and as a part of all units, its longest latency to an owner, and their number.

    Of each of its units it sends what it does not sum to who does, and what it sums to C - 1 others: 1 + (C - 2) f of it.
    """
    num_replicas = len(cuts)
    part = [1.0 if shares is None else shares[name] for name in layout.processors]
    index_of = {name: index for index, name in enumerate(layout.processors)}
    inner = sorted(
        (cut, index, below) for index, replica in enumerate(cuts) for below, cut in enumerate(replica[1:-1], start=1)
    )
    crossings = [cut for cut, _, _ in inner]
    edges = [*sorted({0.0, *(cut for cut in crossings if cut < 1.0)}), 1.0]
    group_s, summed_s, summed = [0.0], [0.0], [0.0]
    latencies = []
    together = fsum(part[index_of[replica.processors[0]]] for replica in layout.replicas)
    owners = LinkGroup(links, [replica.processors[0] for replica in layout.replicas])
    passed = 0
    for start, stop in pairwise(edges):
        while passed < len(inner) and inner[passed][0] <= start:
            _, index, below = inner[passed]
            one, other = layout.replicas[index].processors[below - 1], layout.replicas[index].processors[below]
            owners.replace(one, other)
            together += part[index_of[other]] - part[index_of[one]]
            passed += 1
        link = owners.link()
        group_s.append((stop - start) / link.bandwidth_bytes_per_s)
        of_each = (num_replicas - 2) / together if together > _NOTHING else 0.0
        summed_s.append(of_each * group_s[-1])
        summed.append(of_each * (stop - start))
        latencies.append(link.latency_s)
    elapsed, elapsed_summed, passed_summed = (list(accumulate(each)) for each in (group_s, summed_s, summed))
    position = {edge: index for index, edge in enumerate(edges)}
    owned, traveled, ranges, neighbours = [], [], [], []
    own_part = iter(part)
    for replica in cuts:
        for top, bottom in pairwise(replica):
            first, last, mine = position[top], position[bottom], next(own_part)
            owned.append(elapsed[last] - elapsed[first] + mine * (elapsed_summed[last] - elapsed_summed[first]))
            traveled.append(bottom - top + mine * (passed_summed[last] - passed_summed[first]))
            ranges += [first, last]
            # One neighbour in every other replica, and one more for each of their cuts inside this tile.
            inside = bisect_left(crossings, bottom) - bisect_right(crossings, top)
            neighbours.append(len(cuts) - 1 + inside if first < last else 0)
    # The greatest latency of each tile's groups, at once: of all replicas together the groups are very many.
    longest_s = np.maximum.reduceat([*latencies, 0.0], ranges)[::2].tolist()
    waits_s = [wait_s if own else 0.0 for wait_s, own in zip(longest_s, neighbours, strict=True)]
    return owned, traveled, waits_s, neighbours
