"""What keeps a plan from the ideal, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tatami.cluster import Cluster, Link
from tatami.tiling import Obstacle, Plan, PlanLimits, SlowestLink
from tatami.units import format_bandwidth, format_duration

_LEAST = 0.05
"""Smallest part of an iteration that is worth a line."""
_MOST_NAMED = 3
_WORDS = {
    Obstacle.MESSAGES: "CPU time of sending, receiving and copying messages",
    Obstacle.CALLS: "calls, which cost the same for small and large shares",
    Obstacle.SCATTER: "variation of measured speeds: all wait for the slowest",
    Obstacle.SHARES: "uneven shares (whole samples and units, memory) and work that replicas repeat",
}


def obstacles(plan: Plan, *, cluster: Cluster, found: PlanLimits) -> Iterator[tuple[str, float]]:
    """The obstacles that take 5 % of an iteration or more, in words and in seconds, the largest first."""
    for obstacle, seconds in sorted(found.lost_s.items(), key=lambda pair: -pair[1]):
        if seconds < _LEAST * plan.predicted_s:
            return
        if obstacle is Obstacle.UNUSED:
            number = cluster.size - len(plan.layout.processors)
            yield f"{number} machine{'s' if number > 1 else ''} without work", seconds
        elif obstacle is Obstacle.BANDWIDTH:
            yield f"bytes on {_slowest_link(plan, cluster=cluster, obstacle=obstacle)}", seconds
        elif obstacle is Obstacle.LATENCY:
            yield f"latency of {_slowest_link(plan, cluster=cluster, obstacle=obstacle)}", seconds
        else:
            yield _WORDS[obstacle], seconds


def _slowest_link(plan: Plan, *, cluster: Cluster, obstacle: Obstacle) -> str:
    """Which link holds the plan back, and its bandwidth or latency."""
    names = plan.layout.processors
    found = SlowestLink(cluster).among(names)
    is_latency = obstacle is Obstacle.LATENCY
    has = format_duration(found.latency_s, digits=3) if is_latency else format_bandwidth(found.bandwidth_bytes_per_s, digits=3)

    def holds_back(link: Link) -> bool:
        if is_latency:
            return link.latency_s >= found.latency_s
        return link.bandwidth_bytes_per_s <= found.bandwidth_bytes_per_s

    hosts = list(dict.fromkeys(cluster.host_of[name] for name in names))
    if len(hosts) == 1:
        return f"the link inside {hosts[0]} ({has})"
    pairs = [pair for pair, link in cluster.links.items() if holds_back(link) and set(pair) <= set(hosts)]
    slow = [host for host in hosts if host in cluster.own_links and holds_back(cluster.own_links[host])]
    if slow:
        return f"the link of {_listed(slow)} ({has})"
    if pairs:
        return f"the link between {_listed([' and '.join(pair) for pair in pairs])} ({has})"
    return f"the network between hosts ({has})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_NAMED else f"{names[0]} and {len(names) - 1} more"
