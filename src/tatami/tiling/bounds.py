"""How many bytes a layout sends, and a predicted time that no tiling can beat."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster, Link, fastest
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.layout import Layout
from tatami.tiling.sum_price import sum_size
from tatami.tiling.traffic import sum_algorithm
from tatami.workload import Workload

_BISECTIONS = 60


def volume_bytes(layout: Layout, *, workload: Workload, cluster: Cluster) -> float:
    """What all processors together send for the blocks, of shares that are not cut to whole units.

    Where sums are bandwidth-optimal that is 2 [alpha (sum heights - 1) + beta (sum widths - 1)], section 6: a replica reduces
    by 2 (k - 1) / k of its bytes for each member, a group by 2 (C - 1) / C for each owner.
    """
    sent = 0.0
    for replica, width in zip(layout.replicas, layout.sample_shares(workload.samples), strict=True):
        members = len(replica.processors)
        algorithm = sum_algorithm([cluster.host_of[name] for name in replica.processors])
        ways = [(count, way) for block, count in workload.kinds for way in block.replica_sums]
        if replica.recomputes:
            ways += [(count, way) for block, count in workload.recomputed_kinds for way in block.replica_sums[:1]]
        for count, (elements, sums) in ways:
            size = width * workload.samples * elements / sums / replica.micro_batches
            one = sum_size(algorithm, members=members, size=size, element_bytes=workload.wire_bytes)
            sent += replica.micro_batches * count * sums * members * one.share * size
    sent += 2 * (len(layout.replicas) - 1) * workload.gradient_elements
    return sent * workload.wire_bytes


def time_bound_s(cluster: Cluster, *, workload: Workload, cost: AlphaBetaCost) -> float:
    """A time that no tiling of any shape, of any of the cluster's processors, can beat under `cost`.

    In a time T processor i can cover at most the area A_i(T), if it pays for its own tile alone, in the smallest groups there
    are (two members; a tile over the whole width or height pays nothing on that axis), at the best link of the cluster. The
    bound is the least T with sum A_i(T) >= 1, by bisection.
    """
    speeds = np.array([fastest(processor.speed) for processor in cluster.processors]) * cost.scale(cluster)
    floor = _Floor.of(workload, hides=workload.backward_fraction if cost.may_hide_sums(cluster, workload=workload) else 0.0)
    alone_s = (floor.area_flop + floor.width_flop) / float(speeds.max())
    if cluster.size == 1:
        return alone_s
    link = cluster.fastest_link
    if not floor.area_flop:
        # Every sample has its replica: all that is done is done side by side, and its gradients are summed.
        together_s = floor.width_flop / fsum(speeds)
        return min(alone_s, together_s + max(0.0, _across_s(link, workload=workload) - floor.hides * together_s))
    low, high = floor.area_flop / fsum(speeds), alone_s
    low = min(low, high)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if fsum(_largest_area(middle, speeds, floor=floor, link=link, workload=workload).tolist()) >= 1:
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True, kw_only=True)
class _Floor:
    """What a tile of width w, with the share h of all flop of its replica, costs at least: area_flop w h + width_flop w.

    Attributes:
        gradient_bytes: for h = 1, of the gradients that a tile of several blocks at least has to exchange for its h.
        hides: the part of a whole replica's computation behind which its sums can hide.
    """

    area_flop: float
    width_flop: float
    gradient_bytes: float
    hides: float

    @classmethod
    def of(cls, workload: Workload, *, hides: float) -> _Floor:
        if len(workload.kinds) < 2:
            return cls(
                area_flop=workload.flop_per_area,
                width_flop=workload.flop_per_width,
                gradient_bytes=workload.wire_bytes * workload.gradient_elements,
                hides=hides,
            )
        # A rank without units of a block does not pay what the block costs beside them, so this counts in proportion; and its
        # share may be of the block that has fewest weights for its flop.
        flop = [count * block.flop(units=block.units, samples=workload.samples) for block, count in workload.kinds]
        elements = [count * block.parameters for block, count in workload.kinds]
        repeated = workload.samples * (workload.replicated_flop_per_sample + workload.sample_flop)
        return cls(
            area_flop=fsum(flop),
            width_flop=repeated,
            gradient_bytes=workload.wire_bytes
            * fsum(flop)
            * min(own / each for own, each in zip(elements, flop, strict=True) if each),
            hides=hides,
        )


def _across_s(link: Link, *, workload: Workload) -> float:
    """What a tile of one of several replicas pays at least beside the gradients of its units."""
    return link.transfer_s(workload.replicated_bytes)


def _largest_area(
    time_s: float, speeds: NDArray[np.float64], *, floor: _Floor, link: Link, workload: Workload
) -> NDArray[np.float64]:
    area_s, width_s = floor.area_flop / speeds, floor.width_flop / speeds
    tensor_parallel_s = workload.tensor_parallel_bytes / link.bandwidth_bytes_per_s
    gradients_s = floor.gradient_bytes / link.bandwidth_bytes_per_s
    tensor_parallel_latency_s = workload.tensor_parallel_exchanges * link.latency_s
    across_s = _across_s(link, workload=workload)
    whole = np.where(time_s >= area_s + width_s, 1.0, 0.0)
    full_width = (time_s - width_s - tensor_parallel_s - tensor_parallel_latency_s) / area_s
    # A whole replica hides a part of its sums behind its backward pass.
    full_height = np.minimum(
        time_s / (area_s + width_s), (time_s - gradients_s - across_s) / ((1 - floor.hides) * (area_s + width_s))
    )
    # Inside: area_s w h + for_width_s w + gradients_s h <= rest. The largest area has the last two terms equal, unless that
    # tile would be higher or wider than the floor: frozen weights send nothing, so only the floor's height limits theirs.
    rest = np.maximum(time_s - tensor_parallel_latency_s - across_s, 0.0)
    for_width_s = width_s + tensor_parallel_s
    half = np.sqrt(for_width_s * gradients_s)
    inside = ((np.sqrt(half**2 + area_s * rest) - half) / area_s) ** 2
    inside = np.where(inside * gradients_s > for_width_s, (rest - for_width_s) / (area_s + gradients_s), inside)
    inside = np.where(inside * for_width_s > gradients_s, (rest - gradients_s) / (area_s + for_width_s), inside)
    area: NDArray[np.float64] = np.clip(np.maximum.reduce([whole, full_width, full_height, inside]), 0.0, 1.0)
    return area
