"""What each processor does in an iteration: how long it computes, sums and waits. The parts sum to the price."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tatami.cluster import Cluster
from tatami.tiling.alphabeta import AlphaBetaCost, gradient_sums_s, replica_sums_s, statistics_s
from tatami.tiling.compute import calls_s, repeated, section_flop_times
from tatami.tiling.layout import Layout
from tatami.tiling.links import SlowestLink
from tatami.tiling.speeds import at_tiles
from tatami.workload import Workload

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class ProcessorTime:
    """An iteration of one processor, in seconds.

    Attributes:
        processor: its name.
        compute_s: its own tile, and the calls of its blocks.
        sums_s: tensor-parallel sums inside its replica, and sums of batch statistics.
        gradients_s: the sums of its gradients across the replicas.
        wait_s: the rest of the iteration: others compute or send for longer.
    """

    processor: str
    compute_s: float
    sums_s: float
    gradients_s: float
    wait_s: float

    @property
    def send_s(self) -> float:
        """All its communication."""
        return self.sums_s + self.gradients_s

    @property
    def total_s(self) -> float:
        """The whole iteration."""
        return self.compute_s + self.send_s + self.wait_s


def timeline(
    layout: Layout, *, cluster: Cluster, workload: Workload, cost: AlphaBetaCost | None = None
) -> tuple[ProcessorTime, ...]:
    """The iteration that `cost` prices, of every processor that has a tile, in the order of the layout."""
    cost = AlphaBetaCost() if cost is None else cost
    total_s = cost.price(layout, cluster=cluster, workload=workload).total
    links = SlowestLink(cluster)
    plain = at_tiles(cluster, layout, workload=workload).speeds
    times = np.zeros(len(layout.processors))
    for section in section_flop_times(layout, speeds=plain, workload=workload):
        times += section
    replicas = [index for index, replica in enumerate(layout.replicas) for _ in replica.processors]
    samples = workload.samples * np.array(layout.sample_shares(workload.samples))[replicas]
    again = repeated(layout, workload=workload)[replicas]
    micro_batches = again * [layout.replicas[replica].micro_batches for replica in replicas]
    calls = [
        calls_s(cluster.by_name[name], blocks=len(workload.blocks), micro_batches=number)
        for name, number in zip(layout.processors, micro_batches.tolist(), strict=True)
    ]
    compute_s = (samples * times / cost.scale(cluster) * again + calls).tolist()
    replica_s, statistic_s = replica_sums_s(layout, workload, links), statistics_s(layout, workload, links)
    buckets = cost.buckets(layout, cluster=cluster, workload=workload)
    gradients_s = gradient_sums_s(layout, workload, links, buckets=buckets, compute_s=max(compute_s))
    found = []
    for index, name in enumerate(layout.processors):
        sums_s = replica_s[replicas[index]] + statistic_s
        wait_s = total_s - compute_s[index] - sums_s - gradients_s[index]
        found.append(
            ProcessorTime(
                processor=name,
                compute_s=compute_s[index],
                sums_s=sums_s,
                gradients_s=gradients_s[index],
                wait_s=wait_s if wait_s > _ROUNDING * total_s else 0.0,
            )
        )
    return tuple(found)
