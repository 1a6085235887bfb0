"""Gradient sums that hide behind the backward pass: where each rank is a replica, gradients leave in buckets.

A backward pass of B seconds has the first of n buckets ready after B / n, and so on. They are summed one after the other, in
S seconds all together; when the pass ends there are left S - (1 - 1/n) B seconds of them, and at least the last bucket, or
more where the first layer of the network has more of the weights: its gradients are computed last.
"""

from __future__ import annotations

from collections.abc import Sequence

from tatami.cluster import Cluster
from tatami.tiling.summing import transfer_rates
from tatami.workload import Block, Piece, Workload

LEAST_BUCKET_BYTES = 256 << 10
LARGEST_BUCKET_BYTES = 4 << 20
LEAST_BYTES = 2 * LEAST_BUCKET_BYTES
"""Less than two buckets of gradients would leave at the end of the pass anyway."""
_BUCKETS = 8
_FLOAT32_BYTES = 4
FASTEST_CPU_FLOP_PER_S = 5e12
"""Machines that are faster are taken for GPUs, whose sums follow the backward pass."""


def usual_bucket_bytes(size_bytes: int) -> int:
    """The largest size of a bucket between hosts, where there are so many bytes of gradients.

    It is a part of all of them, so that those of a small network leave early, too: a GPT of 2 MB on four hosts with 1 Gbit/s
    has 0.85 x DDP's speed with one bucket, 0.83 x with 2, and 0.94 to 1.01 x with 8.
    """
    return max(LEAST_BUCKET_BYTES, min(size_bytes // _BUCKETS, LARGEST_BUCKET_BYTES))


def buckets_of(ranks: Sequence[int], *, cluster: Cluster, workload: Workload) -> int:
    """In how many buckets gradients leave while the backward pass computes; 1 where they leave after it.

    Args:
        ranks: of each replica, how many it has.
        cluster: all ranks of the run.
        workload: what is laid out.
    """
    size_bytes = (workload.gradient_elements + workload.replicated_parameters) * workload.element_bytes
    leaves_early = (
        workload.overlaps_sums
        and workload.element_bytes >= _FLOAT32_BYTES
        and size_bytes >= LEAST_BYTES
        and len(ranks) == cluster.size > 1
        and max(ranks) == 1
        and len(set(cluster.host_of.values())) > 1
        and (len(ranks) == 2 or transfer_rates(cluster) is None)
    )
    return -(-size_bytes // usual_bucket_bytes(size_bytes)) if leaves_early else 1


def late_share(workload: Workload) -> float:
    """The part of the gradients that is ready only when the backward pass ends: those of the network's first layer or block."""
    first: Sequence[Piece | Block] = workload.pieces or workload.blocks
    elements = workload.gradient_elements + workload.replicated_parameters
    return min(first[0].parameters / elements, 1.0) if first and elements else 0.0


def not_hidden_s(sums_s: float, *, buckets: int, late: float, backward_s: float) -> float:
    """Seconds of the sums that are left when the backward pass ends.

    Args:
        sums_s: of all of them.
        buckets: in how many they leave; 1: when the pass ends.
        late: the part of them that cannot begin before the pass ends (`late_share`).
        backward_s: of the last micro-batch.
    """
    if buckets == 1:
        return sums_s
    return max(sums_s * max(late, 1 / buckets), sums_s - (1 - 1 / buckets) * backward_s)
