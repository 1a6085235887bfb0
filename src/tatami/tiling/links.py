"""Which link holds a group of processors back: the slowest that its members have between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from tatami.cluster import Cluster, Link


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

    def replace(self, old: str, new: str) -> None:
        """`new` takes the place of `old`."""
        leaves, comes = self._links.host[old], self._links.host[new]
        self._members[leaves] -= 1
        if not self._members[leaves]:
            del self._members[leaves]
        self._members[comes] += 1

    def link(self) -> Link:
        """The least bandwidth and the greatest latency between any two members."""
        cluster, members = self._links.cluster, self._members
        if not cluster.links:
            if len(members) == 1:
                return cluster.local
            return cluster.network if len(members) == self._size else self._links.local_and_network
        crowded = [host for host, count in members.items() if count > 1]
        found = [cluster.links[host, host] for host in crowded if (host, host) in cluster.links]
        if len(found) < len(crowded):
            found.append(cluster.local)
        if cluster.link_table is not None:
            held = cluster.link_table.between(members)
            return slowest(found if held is None else [*found, held])
        nothing: dict[str, Link] = {}
        between = [
            link for host in members for other, link in cluster.links_of_hosts.get(host, nothing).items() if other in members
        ]
        if len(between) < len(members) * (len(members) - 1) // 2:
            found.append(cluster.network)
        return slowest([*found, *between])


def slowest(links: Iterable[Link]) -> Link:
    """The least bandwidth and the greatest latency of `links`, as one link."""
    listed = list(links)
    return Link(
        bandwidth_bytes_per_s=min(map(attrgetter("bandwidth_bytes_per_s"), listed)),
        latency_s=max(map(attrgetter("latency_s"), listed)),
    )
