"""What machines there are: processors, the links between them, and how to ask for one by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property

from tatami.cluster.link import LARGEST_LATENCY_S, LOCAL_LINK, NETWORK_LINK, Link, OwnLink, PairTable, slowest
from tatami.cluster.speed_table import SpeedTable, listed_speeds, speed_problem
from tatami.errors import ClusterError, shortened
from tatami.units import parse_size

MOST_PROCESSORS = 200_000
"""Most processors of a cluster: twice the number that the simulator has been tried with."""
_ALIKE = 1.25
"""Rates that differ by less are the same: they were measured."""
_DENSE = 8
"""Where one pair of hosts in so many has a link of its own, a table of all pairs is looked up in place of the links."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """One rank's device.

    Attributes:
        name: how tilings and logs call it.
        speed: relative, or flop/s once measured; only ratios count. A `SpeedTable` where it depends on the size of the tile.
        host: the machine it is in; processors of one host use the local link. Left out, it is a host of its own, which has
            its name.
        memory_bytes: None where it is not known, and then no limit.
        memory: the same as a text, such as "8 GiB".
        spread: how far a measured speed strayed, relative to it (0.02 for 2 %); None where nothing was measured.
        message_s: what it spends on sending a message, and as much on receiving one: CPU time over its share of a core. On a
            tenth of a core that is milliseconds. 0 where nothing was measured.
        copy_bytes_per_s: at which it takes bytes into messages and out of them; infinite where nothing was measured.
        call_s: what it spends on each block of a network in an iteration, however small its tile is: the calls of forward pass,
            backward pass and update. On a tenth of a core that is milliseconds. 0 where nothing was measured.
        step_s: the same of an iteration, however few blocks it has.
        link: its host's own link to all other hosts; None: the cluster's network.
    """

    name: str
    speed: float
    host: str = ""
    memory_bytes: int | None = None
    spread: float | None = None
    message_s: float = 0.0
    copy_bytes_per_s: float = math.inf
    call_s: float = 0.0
    step_s: float = 0.0
    link: OwnLink | None = None
    memory: InitVar[str | None] = None

    def __post_init__(self, memory: str | None) -> None:
        if not self.host:
            object.__setattr__(self, "host", self.name)
        if memory is not None:
            if self.memory_bytes is not None:
                raise ClusterError(f"processor {self.name!r} is given memory twice: {memory!r} and {self.memory_bytes} bytes")
            object.__setattr__(self, "memory_bytes", parse_size(memory))
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ClusterError(f"the memory of processor {self.name!r} must be > 0 bytes, not {self.memory_bytes}")
        for name, seconds in (("message_s", self.message_s), ("call_s", self.call_s), ("step_s", self.step_s)):
            if not 0 <= seconds <= LARGEST_LATENCY_S:
                raise ClusterError(f"{name} of processor {self.name!r} must be from 0 to a day, not {seconds}")
        if not self.copy_bytes_per_s > 0:
            raise ClusterError(f"copy_bytes_per_s of processor {self.name!r} must be > 0, not {self.copy_bytes_per_s}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processors in the order of the ranks, and the links between them.

    Attributes:
        processors: rank r runs on `processors[r]`.
        local: the link between processors of one host.
        network: the link of every host to the others, except where a processor has one of its own. The link between two hosts
            is the slower one of theirs.
        links: exceptions, by pair of host names (in sorted order; both the same for a host's own local link).
        sample_flop: by a network's sizes ("203-80-26"), what a sample of it costs a rank however few units it has
            (`Workload.sample_flop`); of networks that were probed.
    """

    processors: tuple[Processor, ...]
    local: Link = LOCAL_LINK
    network: Link = NETWORK_LINK
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    sample_flop: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        if not self.processors:
            problems.append("processors: there is none")
        if len(self.processors) > MOST_PROCESSORS:
            problems.append(f"processors: {len(self.processors):,} are too many; at most {MOST_PROCESSORS:,}")
        names: set[str] = set()
        for index, processor in enumerate(self.processors):
            if problem := speed_problem(processor.speed):
                problems.append(f"processors[{index}].speed: {problem} ({processor.name})")
            if processor.name in names:
                problems.append(f"processors[{index}].name: {processor.name!r} is taken already")
            names.add(processor.name)
        found: dict[str, OwnLink] = {}
        for index, processor in enumerate(self.processors):
            if processor.link is not None and found.setdefault(processor.host, processor.link) != processor.link:
                problems.append(f"processors[{index}].link: another processor of host {processor.host!r} has another link")
        problems += [
            f"sample_flop[{net!r}]: must be a finite number >= 0, not {flop}"
            for net, flop in self.sample_flop.items()
            if not 0 <= flop < math.inf
        ]
        for first, second in self.links:
            if first > second:
                problems.append(f"links[{first!r}, {second!r}]: the hosts must be in sorted order")
        if problems:
            raise ClusterError("this cluster is invalid:", problems=problems)

    @classmethod
    def from_speeds(cls, speeds: Sequence[float], *, host: str = "localhost") -> Cluster:
        """Processors p0, p1, ... on one host, of these `speeds`: relative, or in flop/s, all in the same unit.

        Raises:
            ClusterError: something else than a number > 0 for each rank.
        """
        given = enumerate(listed_speeds(speeds))
        return cls(processors=tuple(Processor(name=f"p{i}", speed=speed, host=host) for i, speed in given))

    @property
    def size(self) -> int:
        return len(self.processors)

    @cached_property
    def by_name(self) -> dict[str, Processor]:
        return {processor.name: processor for processor in self.processors}

    @cached_property
    def rank_of(self) -> dict[str, int]:
        """The rank that runs on the processor of this name."""
        return {processor.name: rank for rank, processor in enumerate(self.processors)}

    @cached_property
    def speeds(self) -> dict[str, float]:
        return {processor.name: processor.speed for processor in self.processors}

    @cached_property
    def host_of(self) -> dict[str, str]:
        """The host of each processor."""
        return {processor.name: processor.host for processor in self.processors}

    @cached_property
    def memory_bytes(self) -> dict[str, float]:
        """`Processor.memory_bytes` of each processor; infinite where it is not known."""
        memories = ((processor.name, processor.memory_bytes) for processor in self.processors)
        return {name: math.inf if given is None else float(given) for name, given in memories}

    @cached_property
    def message_s(self) -> dict[str, float]:
        """`Processor.message_s` of each processor."""
        return {processor.name: processor.message_s for processor in self.processors}

    @cached_property
    def copy_bytes_per_s(self) -> dict[str, float]:
        """`Processor.copy_bytes_per_s` of each processor."""
        return {processor.name: processor.copy_bytes_per_s for processor in self.processors}

    @cached_property
    def most_on_a_host(self) -> int:
        """How many processors the host has that has most."""
        return max(Counter(self.host_of.values()).values())

    @cached_property
    def sized(self) -> tuple[str, ...]:
        """The processors whose speed depends on the size of their tile."""
        return tuple(processor.name for processor in self.processors if isinstance(processor.speed, SpeedTable))

    @cached_property
    def memory_known(self) -> bool:
        """Whether there is a processor of which it is known how much memory it has."""
        return any(processor.memory_bytes is not None for processor in self.processors)

    @cached_property
    def messages_known(self) -> bool:
        """Whether it was measured what messages cost those that send and receive them."""
        return any(processor.message_s for processor in self.processors)

    @cached_property
    def calls_known(self) -> bool:
        """Whether it was measured what blocks and iterations cost however small they are."""
        return any(processor.call_s or processor.step_s for processor in self.processors)

    def plain_speeds(self, what: str) -> tuple[float, ...]:
        """The speeds in the order of the ranks, for `what`, which can only use numbers.

        Raises:
            ClusterError: some depend on the size of the tile; names them.
        """
        if self.sized:
            raise ClusterError(
                f"{what} needs one speed for each processor, but those of {shortened(', '.join(self.sized))} depend on the "
                "size of the tile: give them a number in place of the table"
            )
        return tuple(processor.speed for processor in self.processors)

    @cached_property
    def own_links(self) -> dict[str, Link]:
        """The links of hosts that have one of their own, by host; what one leaves out is as the network's."""
        return {each.host: each.link.over(self.network) for each in self.processors if each.link is not None}

    @cached_property
    def links_of_hosts(self) -> dict[str, dict[str, Link]]:
        """By each host its own links to others, by the other's name; each link of a pair is with the first of the two."""
        found: dict[str, dict[str, Link]] = {}
        for (first, second), link in self.links.items():
            if first != second:
                found.setdefault(first, {})[second] = link
        return found

    @cached_property
    def link_table(self) -> PairTable | None:
        """None where few pairs of hosts have a link of their own: then the links are quickly gone through."""
        hosts = tuple(dict.fromkeys(processor.host for processor in self.processors))
        if len(hosts) ** 2 > _DENSE * len(self.links):
            return None
        return PairTable({host: self.link_of(host) for host in hosts}, exceptions=self.links)

    @cached_property
    def fastest_link(self) -> Link:
        """The greatest bandwidth and the least latency of any link that the cluster has, as one link; for lower bounds."""
        listed = [self.local, self.network, *self.links.values(), *self.own_links.values()]
        return Link(
            bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s for link in listed),
            latency_s=min(link.latency_s for link in listed),
        )

    @cached_property
    def slowest_network(self) -> Link:
        """The slowest link of a host to others, exceptions left out."""
        return slowest(map(self.link_of, set(self.host_of.values()))) if self.own_links else self.network

    @cached_property
    def transfer_bytes_per_s(self) -> dict[str, float] | None:
        """The rate at which each processor sends and receives, by its copying and the network; None where all are equal."""
        wire_bytes_per_s = self.slowest_network.bandwidth_bytes_per_s
        own = {each.name: min(wire_bytes_per_s, each.copy_bytes_per_s / 2) for each in self.processors}
        return None if max(own.values()) <= _ALIKE * min(own.values()) else own

    def link_of(self, host: str) -> Link:
        """The link that `host` has to other hosts, where theirs is no slower."""
        return self.own_links.get(host, self.network)

    def only(self, names: Collection[str]) -> Cluster:
        """Some of the processors, in the same order, with the same links; this object where these are all."""
        if len(names) == self.size:
            return self
        kept = set(names)
        return replace(self, processors=tuple(each for each in self.processors if each.name in kept))

    def link(self, one: str, other: str) -> Link:
        """The link between the processors named `one` and `other`."""
        return self.link_between(self.by_name[one].host, self.by_name[other].host)

    def link_between(self, one: str, other: str) -> Link:
        """The link between two hosts; where both are the same, between processors of it."""
        first, second = sorted((one, other))
        if (found := self.links.get((first, second))) is not None:
            return found
        if first == second:
            return self.local
        return slowest((self.link_of(first), self.link_of(second))) if self.own_links else self.network
