"""The machines of a cluster file, as the planners and the lab know them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tatami.cluster import Cluster, Link
from tatami.errors import ClusterError
from tatami.sim.engine import simgrid
from tatami.sim.platforms.base import RDMA, AbstractPlatform, Fabric, PlatformPart, Wire

_MOST_PAIRED = 500
"""Machines that may have links of their own: every pair of them is then told to SimGrid."""


@dataclass(frozen=True, kw_only=True)
class ClusterPlatform(AbstractPlatform):
    """Each processor is a host of SimGrid, in the order of the ranks.

    Between two machines a transfer takes the network's latency, and shares the way out of the one and the way into the other,
    each of the network's bandwidth. An exceptional link between two machines is a cable of its own, beside the network; but all
    that a machine sends shares its card, and all that it is sent, too, which has the bandwidth of the fastest of its links: a
    probe, which measures pair by pair, makes every link an exceptional one. Inside a machine each transfer has the local link
    to itself.

    Attributes:
        cluster: the machines.
        fabric: plain latency and bandwidth by default, as these links were measured.
    """

    cluster: Cluster
    name: str = "cluster"
    fabric: Fabric = field(default=RDMA)

    def __post_init__(self) -> None:
        if self._pairs and len(self._machines) > _MOST_PAIRED:
            raise ClusterError(
                f"{len(self._machines)} machines with links of their own between some are too many to simulate; at most "
                f"{_MOST_PAIRED}, or describe them as groups with backbones (docs/rehearsal.md)"
            )

    @cached_property
    def hosts(self) -> Sequence[str]:
        return tuple(processor.name for processor in self.cluster.processors)

    @property
    def parts(self) -> tuple[PlatformPart, ...]:
        lines = [PlatformPart.wires("network", self.cluster.network), PlatformPart.wires("local", self.cluster.local)]
        lines += [PlatformPart.wires(f"{one} - {other}", link) for (one, other), link in self.cluster.links.items()]
        for host, ranks in self._machines.items():
            speeds = [self.cluster.processors[rank].speed for rank in ranks]
            lines.append(PlatformPart(what=host, count=len(ranks), speed_flop_per_s=sum(speeds)))
        return tuple(lines)

    def unshared(self, source: int, target: int) -> Link | None:
        if source == target or not self._is_plain:
            return None
        machine, other = self.cluster.processors[source].host, self.cluster.processors[target].host
        return self._inside[machine] if machine == other else None

    @property
    def only_link(self) -> Link | None:
        return self.unshared(0, 1) if self.cluster.size > 1 and len(self._machines) == 1 else None

    @property
    def shares_evenly(self) -> bool:
        """Where latencies were measured pair by pair: that one is 4 us and another 40 us is chance, as far as shares go."""
        return self._is_plain and bool(self._pairs)

    @property
    def meet_few(self) -> bool:
        return self._is_plain

    @cached_property
    def _is_plain(self) -> bool:
        """Whether a transfer alone takes what its link says, and no more."""
        return self.fabric == RDMA

    @cached_property
    def _inside(self) -> dict[str, Link]:
        """The link inside of each machine."""
        return {machine: self.cluster.links.get((machine, machine), self.cluster.local) for machine in self._machines}

    def build(self, engine: Any) -> list[Any]:
        grid = simgrid()
        root = engine.netzone_root
        inside = root.add_netzone_full(self.name) if self._pairs else root.add_netzone_star(self.name)
        hosts: dict[int, Any] = {}
        zones, cables, cards = {}, {}, {}
        for machine, ranks in self._machines.items():
            zone = inside.add_netzone_star(f"machine {machine}")
            zone.set_gateway(zone.add_router(f"router {machine}"))
            local = self._inside[machine]
            inside_wire = Wire(bandwidth_bytes_per_s=local.bandwidth_bytes_per_s, latency_s=local.latency_s, fat=True)
            shared = inside_wire.make(zone, f"local {machine}", grid=grid)
            for rank in ranks:
                processor = self.cluster.processors[rank]
                hosts[rank] = zone.add_host(processor.name, processor.speed).seal()
                zone.add_route(hosts[rank], None, [shared], True)
            zone.seal()
            zones[machine] = zone
            network = self._half(self.cluster.network, local)
            cables[machine] = inside.add_split_duplex_link(f"cable {machine}", network.bandwidth_bytes_per_s)
            cables[machine].set_latency(network.latency_s).seal()
            if self._pairs:
                cards[machine] = inside.add_split_duplex_link(f"card {machine}", self._fastest_bytes_per_s(machine)).seal()
        up, down = grid.LinkInRoute.Direction.UP, grid.LinkInRoute.Direction.DOWN
        if not self._pairs:
            for machine, zone in zones.items():
                inside.add_route(zone, None, [grid.LinkInRoute(cables[machine], up)], True)
        for one, other in itertools.combinations(sorted(zones), 2) if self._pairs else ():
            if (link := self._pairs.get((one, other))) is not None:
                cable = inside.add_split_duplex_link(f"cable {one} - {other}", link.bandwidth_bytes_per_s)
                locals_s = sum(self._inside[each].latency_s for each in (one, other))
                cable.set_latency(max(0.0, link.latency_s - locals_s)).seal()
                between = [grid.LinkInRoute(cable, up)]
            else:
                between = [grid.LinkInRoute(cables[one], up), grid.LinkInRoute(cables[other], down)]
            way = [grid.LinkInRoute(cards[one], up), *between, grid.LinkInRoute(cards[other], down)]
            inside.add_route(zones[one], zones[other], way, True)
        inside.seal()
        return [hosts[rank] for rank in range(self.cluster.size)]

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
        return max(self.cluster.network.bandwidth_bytes_per_s, *rates) if rates else self.cluster.network.bandwidth_bytes_per_s

    def _half(self, network: Link, local: Link) -> Link:
        """One end of the network: half its latency, less what the way through the machine takes."""
        latency_s = max(0.0, network.latency_s / 2 - local.latency_s)
        return Link(bandwidth_bytes_per_s=network.bandwidth_bytes_per_s, latency_s=latency_s)
