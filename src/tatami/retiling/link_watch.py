"""Which link became slower or faster: the messages between columns, watched by the same rule as the ranks.

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
from tatami.retiling.noticing import Detector, Vector
from tatami.tiling import Layout, SumKind, traffic_of
from tatami.tiling.traffic import departures
from tatami.workload import Workload

MOST_MESSAGES = 64
"""Of a layout, those that take longest: each is a number more in every iteration's sum."""
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


@dataclass(frozen=True, kw_only=True)
class LinkChange:
    """A link whose messages take longer, or less long.

    Attributes:
        hosts: at its ends.
        count: samples since.
        before, after: time over the expected time.
        error: relative standard error of `after`.
    """

    hosts: Pair
    count: int
    before: float
    after: float
    error: float


class LinkWatch:
    """The links of one run.

    Attributes:
        messages: that are watched as the tiles lie; the same on all ranks, in the same order.
        cluster: with its links as they are known to be now.
    """

    def __init__(self, cluster: Cluster, *, workload: Workload) -> None:
        self._first = self.cluster = cluster
        self._workload = workload
        self._factors: dict[Pair, float] = {}
        self.messages: tuple[WatchedMessage, ...] = ()
        self._pairs: list[Pair] = []
        self._detector: Detector | None = None

    @property
    def slow_hosts(self) -> tuple[str, ...]:
        """At the ends of links that became slower, the slowest first."""
        slow = sorted((pair for pair, factor in self._factors.items() if factor > 1), key=lambda pair: -self._factors[pair])
        return tuple(dict.fromkeys(host for pair in slow for host in pair))

    def lie(self, layout: Layout) -> None:
        """The tiles lie like this from now on; what was measured under others does not compare."""
        self.messages = watched_messages(layout, cluster=self._first, workload=self._workload)
        self._pairs = sorted({message.hosts for message in self.messages})
        self._detector = Detector((len(self._pairs),)) if self._pairs else None

    def take(self, late_s: Sequence[float]) -> list[LinkChange]:
        """Of each of `messages` how long it took; not above 0 where its receiver did not wait. Says which links changed."""
        if self._detector is None or len(late_s) != len(self.messages):
            return []
        values: Vector = np.full(len(self._pairs), np.nan)
        for message, took_s in zip(self.messages, late_s, strict=True):
            if took_s > 0:
                index = self._pairs.index(message.hosts)
                values[index] = np.fmin(values[index], took_s / message.expected_s)
        before = self._detector.level.copy()
        changed = np.flatnonzero(self._detector.step(values))
        found = [self._change(int(index), before=float(before[index])) for index in changed]
        if found:
            self._believe()
        return found

    def _change(self, index: int, *, before: float) -> LinkChange:
        detector = self._detector
        assert detector is not None
        hosts, after = self._pairs[index], float(detector.level[index])
        factor = self._factors.get(hosts, 1.0) * after / before
        self._factors[hosts] = 1.0 if abs(factor - 1.0) < _AS_BEFORE else factor
        return LinkChange(
            hosts=hosts, count=int(detector.count[index]), before=before, after=after, error=float(detector.error[index])
        )

    def _believe(self) -> None:
        """Planners and prices see the links as they are now: all of a transfer takes so many times as long."""
        links = dict(self._first.links)
        for hosts, factor in self._factors.items():
            link = links.get(hosts, self._first.network)
            if factor != 1.0:
                links[hosts] = Link(
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor, latency_s=link.latency_s * factor
                )
        self.cluster = replace(self._first, links=links)


def watched_messages(layout: Layout, *, cluster: Cluster, workload: Workload) -> tuple[WatchedMessage, ...]:
    """The largest message of the first round of gradients from each host to each other one.

    None where gradients leave early: their messages share the links with each other, and none can be timed by itself.
    """
    hosts = {processor.name: processor.host for processor in cluster.processors}
    one_host = len({hosts[name] for name in layout.processors}) < 2
    if one_host or len(layout.columns) < 2 or len(departures(workload)) > 1:
        return ()
    tilings = layout.cut_blocks(workload) or (layout.cut(samples=workload.samples, units=workload.units),)
    traffic = traffic_of(tilings, workload=workload, names=tuple(cluster.by_name), hosts=hosts)
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
