"""What machines there are: processors, the links between them, and how to ask for one by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property

import numpy as np

from tatami.cluster.speed_table import SpeedTable, listed_speeds, speed_problem
from tatami.errors import ClusterError, shortened
from tatami.units import LARGEST_BANDWIDTH_BYTES_PER_S, format_duration, parse_size

SMALLEST_BANDWIDTH_BYTES_PER_S = 1e-3
LARGEST_LATENCY_S = 86400.0
MOST_PROCESSORS = 200_000
"""Of a cluster: twice what the rehearsal has been tried with."""
_DENSE = 8
"""Where one pair of hosts in so many has a link of its own, a table of all pairs is looked up in place of the links."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """One rank's device.

    Attributes:
        name: how tilings and logs call it.
        speed: relative, or flop/s once measured; only ratios count. A `SpeedTable` where it depends on the size of the tile.
        host: the machine it sits in; processors of one host talk over the local link.
        memory_bytes: None where it is not known, and then no limit.
        memory: the same as a text, such as "8 GiB".
        spread: how far a measured speed strayed, relative to it (0.02 for 2 %); None where nothing was measured.
        message_s: what it spends on sending a message, and as much on receiving one: CPU time over its share of a core. On a
            tenth of a core that is milliseconds. 0 where nothing was measured.
        copy_bytes_per_s: at which it takes bytes into messages and out of them; infinite where nothing was measured.
        call_s: what it spends on each block of a network in an iteration, however small its tile is: the calls of forward pass,
            backward pass and update. On a tenth of a core that is milliseconds. 0 where nothing was measured.
        step_s: the same of an iteration, however few blocks it has.
    """

    name: str
    speed: float
    host: str = "localhost"
    memory_bytes: int | None = None
    spread: float | None = None
    message_s: float = 0.0
    copy_bytes_per_s: float = math.inf
    call_s: float = 0.0
    step_s: float = 0.0
    memory: InitVar[str | None] = None

    def __post_init__(self, memory: str | None) -> None:
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
class Link:
    """A way between two processors: `latency_s` for each message, `bandwidth_bytes_per_s` for its bytes."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if problems := link_problems(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=self.latency_s):
            raise ClusterError("; ".join(problems.values()))

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds for one message of `size_bytes`."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


def link_problems(*, bandwidth_bytes_per_s: float, latency_s: float) -> dict[str, str]:
    """What is wrong with the `bandwidth` and the `latency` of a link; empty where nothing is."""
    problems = {}
    if not (math.isfinite(bandwidth_bytes_per_s) and bandwidth_bytes_per_s > 0):
        problems["bandwidth"] = f"the bandwidth of a link must be a finite number > 0 bytes/s, not {bandwidth_bytes_per_s:g}"
    elif not SMALLEST_BANDWIDTH_BYTES_PER_S <= bandwidth_bytes_per_s <= LARGEST_BANDWIDTH_BYTES_PER_S:
        problems["bandwidth"] = (
            f"the bandwidth of a link must be from {SMALLEST_BANDWIDTH_BYTES_PER_S:g} to {LARGEST_BANDWIDTH_BYTES_PER_S:g} "
            f"bytes/s, not {bandwidth_bytes_per_s:g}"
        )
    if not (math.isfinite(latency_s) and latency_s >= 0):
        problems["latency"] = f"the latency of a link must be a finite number >= 0 s, not {latency_s:g}"
    elif latency_s > LARGEST_LATENCY_S:
        problems["latency"] = f"the latency of a link must be at most {format_duration(LARGEST_LATENCY_S)}, not {latency_s:g} s"
    return problems


LOCAL_LINK = Link(bandwidth_bytes_per_s=5e9, latency_s=5e-6)
"""Between ranks of one host, through shared memory, where nothing was measured."""
NETWORK_LINK = Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6)
"""Between hosts, 1 Gbit/s Ethernet, where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processors in the order of the ranks, and the links between them.

    Attributes:
        processors: rank r runs on `processors[r]`.
        local: the link between processors of one host.
        network: the link between hosts.
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
        hosts = len({processor.host for processor in self.processors})
        return PairTable(self) if hosts**2 <= _DENSE * len(self.links) else None

    @cached_property
    def fastest_link(self) -> Link:
        """The greatest bandwidth and the least latency of any link that the cluster has, as one link; for lower bounds."""
        listed = [self.local, self.network, *self.links.values()]
        return Link(
            bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s for link in listed),
            latency_s=min(link.latency_s for link in listed),
        )

    def link(self, one: str, other: str) -> Link:
        """The link between the processors named `one` and `other`."""
        first, second = sorted((self.by_name[one].host, self.by_name[other].host))
        return self.links.get((first, second), self.local if first == second else self.network)


_REMEMBERED = 16
"""Hosts of a group whose slowest link is found once: planners ask for the same few groups again and again."""


class PairTable:
    """Every link between two hosts of a cluster, as arrays: a loop over the 61,075 of 350 hosts would be slow."""

    def __init__(self, cluster: Cluster) -> None:
        self._index = {host: index for index, host in enumerate(dict.fromkeys(each.host for each in cluster.processors))}
        shape = (len(self._index), len(self._index))
        self._bandwidth_bytes_per_s = np.full(shape, cluster.network.bandwidth_bytes_per_s)
        self._latency_s = np.full(shape, cluster.network.latency_s)
        known = [
            (self._index[one], self._index[other], link.bandwidth_bytes_per_s, link.latency_s)
            for (one, other), link in cluster.links.items()
            if one in self._index and other in self._index
        ]
        if known:
            ones, others, bandwidths_bytes_per_s, latencies_s = (list(column) for column in zip(*known, strict=True))
            for pair in ((ones, others), (others, ones)):
                self._bandwidth_bytes_per_s[pair] = bandwidths_bytes_per_s
                self._latency_s[pair] = latencies_s
        # A host's link to itself is no link between two hosts.
        np.fill_diagonal(self._bandwidth_bytes_per_s, np.inf)
        np.fill_diagonal(self._latency_s, -np.inf)
        self._found: dict[tuple[str, ...], Link | None] = {}

    def between(self, hosts: Iterable[str]) -> Link | None:
        """The least bandwidth and the greatest latency between any two of `hosts`, as one link; None for one host."""
        asked = tuple(hosts)
        if len(asked) > _REMEMBERED:
            return self._between(asked)
        if asked not in self._found:
            self._found[asked] = self._between(asked)
        return self._found[asked]

    def _between(self, hosts: Sequence[str]) -> Link | None:
        at = np.array([self._index[host] for host in hosts])
        if len(at) < 2:
            return None
        pairs = at[:, np.newaxis], at
        return Link(
            bandwidth_bytes_per_s=float(self._bandwidth_bytes_per_s[pairs].min()), latency_s=float(self._latency_s[pairs].max())
        )
