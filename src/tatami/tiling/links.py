"""Which link holds a group of processors back: the slowest that its members have between them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable

from tatami.cluster import Cluster, Link
from tatami.cluster.link import slowest


class SlowestLink:
    """Looks up the slowest link among processors of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.host = cluster.host_of
        self.local_and_network = slowest((cluster.local, cluster.network))

    def among(self, names: Iterable[str]) -> Link:
        """The slowest link between any two of `names`, of which there are at least two."""
        return LinkGroup(self, names).link()


class LinkGroup:
    """Processors of which one at a time is replaced, and the slowest link among them.

    Thousands of groups of hundreds are asked about, one after the other: it counts the members of hosts, and never looks at
    pairs of processors.
    """

    def __init__(self, links: SlowestLink, names: Iterable[str]) -> None:
        self._links = links
        self._members = Counter(map(links.host.__getitem__, names))
        self._size = self._members.total()
        self._own: _SlowestOwn | None = None

    def replace(self, old: str, new: str) -> None:
        """`new` takes the place of `old`."""
        if self._own is None and self._links.cluster.own_links:
            self._own = _SlowestOwn(self._links.cluster, self._members)
        leaves, comes = self._links.host[old], self._links.host[new]
        self._members[leaves] -= 1
        if not self._members[leaves]:
            del self._members[leaves]
        self._members[comes] += 1
        if self._own is not None:
            self._own.add(comes)

    def link(self) -> Link:
        """The least bandwidth and the greatest latency between any two members."""
        cluster, members = self._links.cluster, self._members
        if not cluster.links:
            if len(members) == 1:
                return cluster.local
            if cluster.own_links:
                held = slowest(map(cluster.link_of, members)) if self._own is None else self._own.among(members)
                return held if len(members) == self._size else slowest((held, cluster.local))
            return cluster.network if len(members) == self._size else self._links.local_and_network
        crowded = [host for host, count in members.items() if count > 1]
        found = [cluster.links[host, host] for host in crowded if (host, host) in cluster.links]
        if len(found) < len(crowded):
            found.append(cluster.local)
        if cluster.link_table is not None:
            between_hosts = cluster.link_table.between(members)
            return slowest(found if between_hosts is None else [*found, between_hosts])
        nothing: dict[str, Link] = {}
        between = [
            link for host in members for other, link in cluster.links_of_hosts.get(host, nothing).items() if other in members
        ]
        if len(between) < len(members) * (len(members) - 1) // 2:
            found.extend(self._usual())
        return slowest([*found, *between])

    def _usual(self) -> Iterable[Link]:
        """The links of those members that have one to some other member that is no exception."""
        cluster, members = self._links.cluster, self._members
        if not cluster.own_links:
            return (cluster.network,)
        pairs = [(one, other) for one in members for other in cluster.links_of_hosts.get(one, ()) if other in members]
        exceptions = Counter(host for pair in pairs for host in pair)
        return map(cluster.link_of, (host for host in members if exceptions[host] < len(members) - 1))


class _SlowestOwn:
    """The slowest of the links of hosts, where those that leave are many and each is as often asked for: two heaps."""

    def __init__(self, cluster: Cluster, hosts: Iterable[str]) -> None:
        self._cluster = cluster
        self._heaps: tuple[list[tuple[float, str]], list[tuple[float, str]]] = ([], [])
        for host in hosts:
            self.add(host)

    def add(self, host: str) -> None:
        link = self._cluster.link_of(host)
        heapq.heappush(self._heaps[0], (link.bandwidth_bytes_per_s, host))
        heapq.heappush(self._heaps[1], (-link.latency_s, host))

    def among(self, hosts: Container[str]) -> Link:
        """The slowest link among `hosts`, all of which were added; others are forgotten."""
        for heap in self._heaps:
            while heap[0][1] not in hosts:
                heapq.heappop(heap)
        (bandwidth_bytes_per_s, _), (latency_s, _) = self._heaps[0][0], self._heaps[1][0]
        return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=-latency_s)
