"""The machines of a cluster file, as the planners and the lab know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tatami.cluster import Cluster, Link
from tatami.sim.platforms.base import RDMA, AbstractPlatform, Cable, Fabric, PlatformPart


@dataclass(frozen=True, kw_only=True)
class ClusterPlatform(AbstractPlatform):
    """Each processor is a host, in the order of the ranks.

    Between two machines a transfer takes the longer latency of their links to the network, and shares the way out of the one
    and the way into the other, each of its machine's bandwidth. An exceptional link between two machines is a cable of its own,
    beside the network; but all that a machine sends shares its card, and all that it is sent, too, which has the bandwidth of
    the fastest of its links: a probe, which measures pair by pair, makes every link an exceptional one. Inside a machine each
    transfer has the local link to itself.

    Attributes:
        cluster: the machines.
        fabric: plain latency and bandwidth by default, as these links were measured.
    """

    cluster: Cluster
    name: str = "cluster"
    fabric: Fabric = field(default=RDMA)

    @cached_property
    def hosts(self) -> Sequence[str]:
        return tuple(processor.name for processor in self.cluster.processors)

    @property
    def parts(self) -> tuple[PlatformPart, ...]:
        lines = [PlatformPart.wires("network", self.cluster.network), PlatformPart.wires("local", self.cluster.local)]
        lines += [PlatformPart.wires(f"{one} - {other}", link) for (one, other), link in self.cluster.links.items()]
        lines += [PlatformPart.wires(f"{host} - all", link) for host, link in self.cluster.own_links.items()]
        for host, ranks in self._machines.items():
            speeds = [self.cluster.processors[rank].speed for rank in ranks]
            lines.append(PlatformPart(what=host, count=len(ranks), speed_flop_per_s=sum(speeds)))
        return tuple(lines)

    @cached_property
    def speeds_flop_per_s(self) -> Sequence[float]:
        return tuple(float(processor.speed) for processor in self.cluster.processors)

    def way(self, source: int, target: int) -> Sequence[Cable]:
        machine, other = (self.cluster.processors[rank].host for rank in (source, target))
        if machine == other:
            return (self._local(machine),)
        return (self._local(machine), *self._between(machine, other), self._local(other))

    @property
    def shares_evenly(self) -> bool:
        """Where latencies were measured pair by pair: that one is 4 us and another 40 us is chance, as far as shares go."""
        return self.fabric == RDMA and bool(self._pairs)

    def _local(self, machine: str) -> Cable:
        link = self.cluster.links.get((machine, machine), self.cluster.local)
        return Cable(
            name=f"local {machine}", bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s, fat=True
        )

    def _between(self, machine: str, other: str) -> Sequence[Cable]:
        pair = (machine, other) if (machine, other) in self._pairs else (other, machine)
        local_s = {each: self._local(each).latency_s for each in (machine, other)}
        if (link := self._pairs.get(pair)) is not None:
            latency_s = max(0.0, link.latency_s - sum(local_s.values()))
            cables = [
                Cable(name=f"{machine} to {other}", bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=latency_s)
            ]
        else:
            # Each end has half of the longer latency, less what the way through the machine takes.
            latency_s = max(self.cluster.link_of(each).latency_s for each in (machine, other))
            cables = [
                Cable(
                    name=f"{way} {each}",
                    bandwidth_bytes_per_s=self.cluster.link_of(each).bandwidth_bytes_per_s,
                    latency_s=max(0.0, latency_s / 2 - local_s[each]),
                )
                for way, each in (("out of", machine), ("into", other))
            ]
        if not self._pairs:
            return cables
        out, into = (
            Cable(name=f"card {way} {each}", bandwidth_bytes_per_s=self._fastest_bytes_per_s(each), latency_s=0.0)
            for way, each in (("out of", machine), ("into", other))
        )
        return (out, *cables, into)

    @cached_property
    def _machines(self) -> dict[str, list[int]]:
        machines: dict[str, list[int]] = {}
        for rank, processor in enumerate(self.cluster.processors):
            machines.setdefault(processor.host, []).append(rank)
        return machines

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], Link]:
        return {(one, other): link for (one, other), link in self.cluster.links.items() if one != other}

    def _fastest_bytes_per_s(self, machine: str) -> float:
        rates = [link.bandwidth_bytes_per_s for hosts, link in self._pairs.items() if machine in hosts]
        return max([self.cluster.link_of(machine).bandwidth_bytes_per_s, *rates])
