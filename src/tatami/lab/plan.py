"""How a cluster becomes a lab: which host has which address, and which processor how much of a core. Decides, does nothing."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tatami.cluster import Cluster, Link, OwnLink
from tatami.cluster.speed_table import MEASURED_FROM
from tatami.errors import ClusterError, InputError, shortened

LARGEST_SHARE = 0.95
"""Largest share of a core for one rank: what is left is for the kernel's own work, which comes to every core."""
FULLEST = 0.9
"""Largest share of all cores for all ranks: threads that do not fit side by side must be moved, and that takes room."""
NETWORK = ipaddress.IPv4Network("10.77.0.0/16")
"""Addresses inside the namespaces only: the machine may use the same addresses without a collision."""
SWITCH = "switch"
"""The host on which mpiexec runs: it is the bridge itself, and no processor is on it."""
NATIVE_LATENCY_S = 100e-6
"""About what a small message takes between two namespaces with nothing added."""

BALANCE = 8.0
"""Flop that a paced host does while it moves a byte: a core of 50 Gflop/s and 6 GB/s has 8, a graphics card 10 to 60."""

_HOST_NAME = re.compile(
    r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*", re.ASCII
)
_LONGEST_NAME = 63


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host of the lab.

    Attributes:
        name: as in the cluster.
        index: its place among the hosts; its address is made of it.
        processors: their indices in the cluster, which are ranks.
        memory_bytes: what all its processes together may have; None: no limit.
    """

    name: str
    index: int
    processors: tuple[int, ...]
    memory_bytes: int | None = None

    @property
    def address(self) -> str:
        return str(NETWORK[self.index + 1])


@dataclass(frozen=True, kw_only=True)
class LabPlan:
    """What a lab is to be.

    Attributes:
        cluster: what was asked for.
        hosts: in the order in which the cluster names them.
        cores: of this machine, that all processors together may use.
        scale: cores for one unit of speed; 1 where hosts are paced.
        paced: whether hosts last as long as their speeds say, in place of computing with a part of a core.
        dilation: so many times as long as the cluster's speeds and links say everything takes.
        balance: flop that a paced host could do while it moves a byte.
    """

    cluster: Cluster
    hosts: tuple[Host, ...]
    cores: float
    scale: float
    paced: bool = False
    dilation: float = 1.0
    balance: float = BALANCE

    @cached_property
    def by_name(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @property
    def quotas(self) -> tuple[float, ...]:
        """Cores of each processor, in the order of the ranks."""
        return tuple(processor.speed * self.scale for processor in self.cluster.processors)

    def exceptions(self, host: Host) -> dict[str, Link]:
        """The links of `host` to other hosts that are not as the network is, by the name of the other."""
        found = {}
        for pair, link in self.cluster.links.items():
            if host.name in pair and pair[0] != pair[1]:
                other = pair[1] if pair[0] == host.name else pair[0]
                if other in self.by_name:
                    found[other] = link
        return found

    def link(self, one: str, other: str) -> Link:
        """The link between two hosts."""
        return self.cluster.link_between(one, other)

    def longest_latency_s(self) -> float:
        """The longest latency of a link between hosts, in seconds, where it is longer than a lab's own; else 0."""
        links = [self.cluster.network, *(link for host in self.hosts for link in self.exceptions(host).values())]
        longest = max(link.latency_s for link in links)
        return longest if len(self.hosts) > 1 and longest > NATIVE_LATENCY_S else 0.0

    def describe(self) -> str:
        """One line: how large the lab is, and what a speed means in it."""
        size = f"lab: {_count(len(self.hosts), 'host')}, {_count(self.cluster.size, 'processor')}"
        if self.paced:
            times = "" if self.dilation == 1 else f"; all takes {self.dilation:g} times as long as the cluster file says"
            return f"{size}; paced: the fastest processor computes {max(self.cluster.speeds.values()) / 1e9:.3g} Gflop/s{times}"
        used = math.fsum(self.quotas)
        fastest = max(self.cluster.speeds.values())
        return (
            f"{size}; scale: the fastest processor "
            f"(speed {fastest:g}) is {fastest * self.scale:.3g} of a core, all together are {used:.3g} of {self.cores:g} cores"
        )


def plan_lab(
    cluster: Cluster,
    *,
    cores: float,
    base_bytes: int | None = None,
    paced: bool = False,
    dilation: float = 1.0,
    balance: float = BALANCE,
) -> LabPlan:
    """Scale the speeds of `cluster` to `cores` cores, as large as they can be.

    Args:
        cluster: its hosts' names become host names, and its processors ranks in their order.
        cores: of this machine, that the lab may use; may be a fraction.
        base_bytes: limit each host to the memory of its processors, and so much more for each, which is what a process has of
            its own; None: no limit.
        paced, dilation, balance: as `Lab` has them.

    Raises:
        ClusterError: host names that no machine can have, all of them at once; speeds that depend on the size of the tile;
            own links with a latency; with `base_bytes`, processors without memory; paced, speeds that are not in flop/s.
        InputError: `cores` is not a finite number > 0, there are more hosts than addresses, or all is to take longer, or less
            long, where hosts are not paced.
    """
    if not (math.isfinite(dilation) and dilation > 0):
        raise InputError(f"dilate must be a finite number > 0, not {dilation}: how many times as long all takes")
    if not (math.isfinite(balance) and balance > 0):
        raise InputError(f"balance must be a finite number > 0, not {balance}: flop that a host could do while it moves a byte")
    if balance != BALANCE and not paced:
        raise InputError("only a paced lab has a balance of computing and moving bytes. Give --paced, too (paced=True)")
    if dilation != 1 and not paced:
        raise InputError("only a paced lab can dilate time: quotas are parts of a core already. Give --paced, too (paced=True)")
    if not (math.isfinite(cores) and cores > 0):
        raise InputError(f"cores must be a finite number > 0, not {cores}: it is how much of this machine the lab may use")
    places: dict[str, list[int]] = {}
    for rank, processor in enumerate(cluster.processors):
        places.setdefault(processor.host, []).append(rank)
    if problems := [f"host {name!r}: {problem}" for name in places if (problem := _name_problem(name, places))]:
        raise ClusterError("this cluster cannot be played in a lab; rename hosts in the cluster file:", problems=problems)
    if len(places) > NETWORK.num_addresses - 4:
        raise InputError(f"{len(places)} hosts are too many for one lab; it has {NETWORK.num_addresses - 4} addresses")
    later = [each.name for each in cluster.processors if each.link is not None and each.link.latency_s is not None]
    if later:
        raise ClusterError(
            f"a lab delays messages by pairs of hosts, but the links of {shortened(', '.join(later))} have latencies of their "
            "own: leave them out, or give [[links]]"
        )
    speeds = cluster.plain_speeds("a lab, which gives each processor its share of a core,")
    if paced and max(speeds) < MEASURED_FROM:
        raise ClusterError(
            f"a paced lab must know how long an operation takes: give speeds in flop/s, as 20e9, not {max(speeds):g}"
        )
    cluster = _dilated(cluster, dilation)
    scale = 1.0 if paced else min(LARGEST_SHARE / max(speeds), FULLEST * cores / math.fsum(speeds))
    memory = {name: _memory_bytes(cluster, ranks, base_bytes) for name, ranks in places.items()}
    hosts = tuple(
        Host(name=name, index=i, processors=tuple(ranks), memory_bytes=memory[name])
        for i, (name, ranks) in enumerate(places.items())
    )
    return LabPlan(cluster=cluster, hosts=hosts, cores=cores, scale=scale, paced=paced, dilation=dilation, balance=balance)


def _dilated(cluster: Cluster, times: float) -> Cluster:
    """The same cluster, whose computing and whose messages between hosts take so many times as long."""

    def slow(link: Link) -> Link:
        return Link(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times, latency_s=link.latency_s * times)

    def slow_own(own: OwnLink) -> OwnLink:
        rate, latency_s = own.bandwidth_bytes_per_s, own.latency_s
        return OwnLink(
            bandwidth_bytes_per_s=None if rate is None else rate / times,
            latency_s=None if latency_s is None else latency_s * times,
        )

    if times == 1:
        return cluster
    processors = (
        replace(each, speed=each.speed / times, link=None if each.link is None else slow_own(each.link))
        for each in cluster.processors
    )
    links = {pair: slow(link) for pair, link in cluster.links.items()}
    return replace(cluster, processors=tuple(processors), network=slow(cluster.network), links=links)


def _memory_bytes(cluster: Cluster, ranks: list[int], base_bytes: int | None) -> int | None:
    if base_bytes is None:
        return None
    limit_bytes = 0
    for processor in (cluster.processors[rank] for rank in ranks):
        if processor.memory_bytes is None:
            raise ClusterError(
                f"processor {processor.name!r} has no memory, and the lab is to limit it: give it one, as in "
                'memory = "1 GiB", or leave base_memory out'
            )
        limit_bytes += processor.memory_bytes + base_bytes
    return limit_bytes


def switch_address() -> str:
    return str(NETWORK[-2])


def _name_problem(name: str, names: Mapping[str, object]) -> str | None:
    if name == "localhost":
        return 'is what every machine calls itself; give each processor a `host` of its own name, as host = "h{i}"'
    if name == SWITCH:
        return "is what the lab calls the machine between the hosts"
    if len(name) > _LONGEST_NAME or not _HOST_NAME.fullmatch(name):
        return f"is not a host name: letters, digits and '-', parts joined by '.', at most {_LONGEST_NAME} characters"
    # A name of digits and dots would be read as an address.
    if all(part.isdigit() for part in name.split(".")):
        return "would be read as an address: a host name has a letter in it"
    lower = [other for other in names if other != name and other.lower() == name.lower()]
    return f"and {lower[0]!r} are the same name: case does not count" if lower else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
