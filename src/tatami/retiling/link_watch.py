"""Which link became slower or faster: the messages between replicas, watched by the same rule as the ranks.

Of each two hosts that exchange gradients, the largest message in each direction is watched. Its time runs from when it was sent
until it arrived, by clocks that all start when the ranks leave the sum of the iteration before together; only messages that
a receiver waited for count, as one that lay there already may have come at any time. In units of what the link is expected to
take, these are samples of its slowness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tatami.cluster import Cluster, Link
from tatami.retiling.noticing import Vector
from tatami.tiling import Layout, SumKind, traffic_of
from tatami.tiling.summing import transfer_rates
from tatami.workload import Workload

MOST_MESSAGES = 64
"""Most messages of a layout that are watched, the longest: each adds a number to every iteration's sum."""
_AS_BEFORE = 0.15
"""A link within so much of what it was is what it was."""

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class WatchedMessage:
    """A message whose time is looked at.

    Attributes:
        source, dest: ranks.
        hosts: theirs, in sorted order.
        expected_s: what the link takes for it, as the cluster says.
    """

    source: int
    dest: int
    hosts: Pair
    expected_s: float


class LinkWatch:
    """The links of one run.

    Attributes:
        messages: that are watched as the tiles lie; the same on all ranks, in the same order.
        pairs: the hosts at the ends of the links that they take.
        cluster: with its links as they are known to be now.
    """

    def __init__(self, cluster: Cluster, *, workload: Workload) -> None:
        self._first = self.cluster = cluster
        self._workload = workload
        self._factors: dict[Pair, float] = {}
        self.messages: tuple[WatchedMessage, ...] = ()
        self.pairs: tuple[Pair, ...] = ()

    @property
    def slow_hosts(self) -> tuple[str, ...]:
        """At the ends of links that became slower, the slowest first."""
        slow = sorted((pair for pair, factor in self._factors.items() if factor > 1), key=lambda pair: -self._factors[pair])
        return tuple(dict.fromkeys(host for pair in slow for host in pair))

    def messages_of(self, layout: Layout) -> tuple[WatchedMessage, ...]:
        """What is watched where the tiles lie like `layout`."""
        return watched_messages(layout, cluster=self._first, workload=self._workload)

    def lie(self, messages: tuple[WatchedMessage, ...]) -> None:
        """These are watched from now on, as `messages_of` has them."""
        self.messages = messages
        self.pairs = tuple(sorted({message.hosts for message in self.messages}))
        of = np.array([self.pairs.index(message.hosts) for message in self.messages], dtype=np.int64)
        self._order = np.argsort(of, kind="stable")
        self._starts = np.searchsorted(of[self._order], np.arange(len(self.pairs)))
        self._expected_s: Vector = np.array([message.expected_s for message in self.messages])[self._order]
        self._unknown: Vector = np.full(len(self.pairs), np.nan)

    def slowness(self, late_s: Sequence[float]) -> Vector:
        """How many times as long as expected the messages between each of `pairs` took, the faster one of both directions.

        Args:
            late_s: of each of `messages` how long it took; not above 0 where its receiver did not wait.

        Returns:
            (pairs,); NaN where no message counts, and everywhere where nothing is told of the messages.
        """
        if len(late_s) != len(self.messages) or not self.pairs:
            return self._unknown
        took_s = np.asarray(late_s, dtype=np.float64)[self._order]
        slowness = np.where(took_s > 0, took_s / self._expected_s, np.nan)
        found: Vector = np.fmin.reduceat(slowness, self._starts)
        return found

    def changed(self, hosts: Pair, *, slower: float) -> None:
        """Planners and prices see the link as it is now: all of a transfer takes so many times as long as it did."""
        factor = self._factors.get(hosts, 1.0) * slower
        self._factors[hosts] = 1.0 if abs(factor - 1.0) < _AS_BEFORE else factor
        links = dict(self._first.links)
        for pair, times in self._factors.items():
            link = self._first.link_between(*pair)
            if times != 1.0:
                links[pair] = Link(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times, latency_s=link.latency_s * times)
        self.cluster = replace(self._first, links=links)


def watched_messages(layout: Layout, *, cluster: Cluster, workload: Workload) -> tuple[WatchedMessage, ...]:
    """The largest message of the first round of gradients from each host to each other one."""
    hosts = cluster.host_of
    one_host = len({hosts[name] for name in layout.processors}) < 2
    if one_host or len(layout.replicas) < 2:
        return ()
    tilings = layout.cut_blocks(workload) or (layout.cut(samples=workload.samples, units=workload.units),)
    traffic = traffic_of(tilings, workload=workload, names=tuple(cluster.by_name), hosts=hosts, rates=transfer_rates(cluster))
    sizes: dict[tuple[int, int], int] = {}
    for planned in traffic.gradients:
        if planned.kind is SumKind.GRADIENTS:
            for step in planned.schedule.phases[0].steps(0):
                sizes[step.source, step.target] = sizes.get((step.source, step.target), 0) + step.size * planned.element_bytes
    largest: dict[Pair, WatchedMessage] = {}
    for (source, dest), size_bytes in sorted(sizes.items()):
        one, other = cluster.processors[source], cluster.processors[dest]
        first, second = sorted((one.host, other.host))
        if first == second or not size_bytes:
            continue
        expected_s = cluster.link(one.name, other.name).transfer_s(size_bytes)
        known = largest.get((one.host, other.host))
        if known is None or expected_s > known.expected_s:
            largest[one.host, other.host] = WatchedMessage(
                source=source, dest=dest, hosts=(first, second), expected_s=expected_s
            )
    kept = sorted(largest.values(), key=lambda each: (-each.expected_s, each.source, each.dest))[:MOST_MESSAGES]
    return tuple(sorted(kept, key=lambda each: (each.source, each.dest)))
