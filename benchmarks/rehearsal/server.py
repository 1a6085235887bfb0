"""Rounds of the parameter server over real links: what is measured in a lab, and what the simulator makes of it.

Each host is a node of Ray in a namespace, and computing is a sleep: what is held against the simulator is who waits for whom,
and what shares a link. Hosts run at the machine's full speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tatami.cluster import Cluster, Link, Processor
from tatami.sim.platforms import ClusterPlatform
from tatami.sim.server import ServerSetup

FLOAT_BYTES = 4
TINY = 1024
"""Elements of a model whose rounds take what rounds take beside the work and the bytes."""
_SIMULATED_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class ServerJob:
    """What one lab measures.

    Attributes:
        bandwidth_bytes_per_s: of all links.
        cases: numbers of workers and of servers.
        transfer_s: that a model takes over one link alone.
        task_s: that each worker computes in a round.
        rounds: of each case; the first two are not counted.
    """

    bandwidth_bytes_per_s: float
    cases: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (3, 1), (2, 2))
    transfer_s: float = 0.4
    task_s: float = 1.0
    rounds: int = 8

    @property
    def elements(self) -> int:
        """Parameters of the model."""
        return round(self.transfer_s * self.bandwidth_bytes_per_s / FLOAT_BYTES)

    @property
    def cluster(self) -> Cluster:
        """As the lab is asked for it: a host for each worker, and one more."""
        return _star(
            1 + max(workers for workers, _ in self.cases),
            Link(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=50e-6),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `server_job_from_dict` reads it back."""
        return asdict(self)


def server_job_from_dict(values: Mapping[str, Any]) -> ServerJob:
    """What `ServerJob.to_dict` wrote."""
    cases = tuple((workers, servers) for workers, servers in values["cases"])
    return ServerJob(**{**values, "cases": cases})


def setup_of(found: Mapping[str, Any], case: Mapping[str, Any], job: ServerJob) -> ServerSetup:
    """The same case on simulated machines, with constants that have not seen what is to be predicted.

    Args:
        found: `transfers`, seconds for sizes, of one object alone between two hosts.
        case: `workers` and `servers`, the hosts they were on; and `tiny_s`: rounds of a model that has next to no bytes.
    """
    (small, small_s), (large, large_s) = ((each["size_bytes"], median(each["seconds"])) for each in found["transfers"])
    rate = (large - small) / (large_s - small_s)
    link = Link(bandwidth_bytes_per_s=rate, latency_s=max(0.0, small_s - small / rate))
    workers, servers = tuple(case["workers"]), tuple(case["servers"])
    return ServerSetup(
        platform=ClusterPlatform(cluster=_star(len(workers) + len(servers), link)),
        workers=workers,
        servers=servers,
        rounds=_SIMULATED_ROUNDS,
        task_flop=job.task_s,
        model_bytes=job.elements * FLOAT_BYTES,
        apply_s=max(0.0, median(case["tiny_s"]) - job.task_s),
        mtbf_s=None,
    )


def _star(hosts: int, link: Link) -> Cluster:
    processors = tuple(Processor(name=f"p{i}", speed=1.0, host=f"h{i}") for i in range(hosts))
    return Cluster(processors=processors, network=link)
