"""Links: between two processors, of a host to all others, and the slowest of many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from tatami.errors import ClusterError
from tatami.units import LARGEST_BANDWIDTH_BYTES_PER_S, format_duration

SMALLEST_BANDWIDTH_BYTES_PER_S = 1e-3
LARGEST_LATENCY_S = 86400.0
_LONGEST_S = 60.0
"""No network takes as long for a message: a unit was forgotten."""


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


@dataclass(frozen=True, kw_only=True)
class OwnLink:
    """What is said of a link, at least one of the two: of one host's to all others, or of all; None where it is as usual."""

    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s is None and self.latency_s is None:
            raise ClusterError("give it a bandwidth or a latency")
        self.over(NETWORK_LINK)

    @classmethod
    def of(cls, link: Link) -> OwnLink:
        """The whole of `link`."""
        return cls(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s)

    def over(self, network: Link) -> Link:
        """The whole link, where the rest is as that of `network`."""
        bandwidth, latency_s = self.bandwidth_bytes_per_s, self.latency_s
        return Link(
            bandwidth_bytes_per_s=network.bandwidth_bytes_per_s if bandwidth is None else bandwidth,
            latency_s=network.latency_s if latency_s is None else latency_s,
        )


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
    elif latency_s > _LONGEST_S:
        problems["latency"] = (
            f"the latency of a link must be at most {format_duration(_LONGEST_S)}, not {latency_s:g} s: a number without "
            'a unit is in seconds; write "200 us"'
        )
    return problems


LOCAL_LINK = Link(bandwidth_bytes_per_s=5e9, latency_s=5e-6)
"""Between ranks of one host, through shared memory, where nothing was measured."""
NETWORK_LINK = Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6)
"""Between hosts, 1 Gbit/s Ethernet, where nothing was measured."""


def slowest(links: Iterable[Link]) -> Link:
    """The least bandwidth and the greatest latency of `links`, as one link."""
    listed = list(links)
    if len(listed) == 1:
        return listed[0]
    return Link(
        bandwidth_bytes_per_s=min(map(attrgetter("bandwidth_bytes_per_s"), listed)),
        latency_s=max(map(attrgetter("latency_s"), listed)),
    )


_REMEMBERED = 16
"""Hosts of a group whose slowest link is found once: planners ask for the same few groups again and again."""


class PairTable:
    """The link between any two hosts, as arrays: a loop over the 61,075 pairs of 350 hosts would be slow."""

    def __init__(self, links: Mapping[str, Link], *, exceptions: Mapping[tuple[str, str], Link]) -> None:
        """
        Args:
            links: of each host to all others: the slower one of two counts.
            exceptions: by pair of hosts; others than these hosts may be among them.
        """
        self._index = {host: index for index, host in enumerate(links)}
        bandwidth_bytes_per_s = np.array([link.bandwidth_bytes_per_s for link in links.values()])
        latency_s = np.array([link.latency_s for link in links.values()])
        self._bandwidth_bytes_per_s = np.minimum.outer(bandwidth_bytes_per_s, bandwidth_bytes_per_s)
        self._latency_s = np.maximum.outer(latency_s, latency_s)
        known = [
            (self._index[one], self._index[other], link.bandwidth_bytes_per_s, link.latency_s)
            for (one, other), link in exceptions.items()
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
