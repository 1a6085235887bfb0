"""Links divided among the transfers that pass them, as SimGrid's model CM02 does, looking only at those that a change reaches.

Where a transfer begins or ends, SimGrid (with `network/optim:Full`) divides all links again: of n transfers that end one by
one that is n^2 looks. Here those are looked at that share a link with it, those that share one with these, and so on. Where
transfers meet few others, as in a fat tree that each rank sends one message into, that is a handful.

Bandwidth is max-min fair. The rates of transfers rise together, each in proportion to its weight, until a link is full; those
that pass it keep their rate, and the others go on. A transfer weighs 1 / latency: of two on one link, the nearer gets more.
Where latencies were measured (`AbstractPlatform.shares_evenly`), all weigh the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tatami.sim.engine import simgrid

_EQUAL = 1e-12
"""Relative: links that are full at levels that differ by less are full together."""


@dataclass(eq=False, slots=True, kw_only=True)
class Lane:
    """A link in one direction, and what moves on it now.

    Attributes:
        bandwidth_bytes_per_s: for all together.
        flows: in the order in which they came; the values mean nothing.
    """

    bandwidth_bytes_per_s: float
    flows: dict[Flow, None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinkPath:
    """The way from one host to another.

    Attributes:
        latency_s: before the first byte moves.
        lanes: the links that others may share.
        most_bytes_per_s: the least bandwidth of all.
        weight: of a transfer that goes this way, beside others.
    """

    latency_s: float
    lanes: tuple[Lane, ...]
    most_bytes_per_s: float
    weight: float = 1.0


class LinkPaths:
    """The ways that SimGrid's hosts have, each asked for once; `evenly`: all transfers weigh the same."""

    def __init__(self, hosts: Sequence[Any], *, evenly: bool) -> None:
        self._hosts = hosts
        self._evenly = evenly
        self._fat = simgrid().Link.SharingPolicy.FATPIPE
        self._lanes: dict[Any, Lane] = {}
        self._known: dict[tuple[int, int], LinkPath] = {}

    def of(self, source: int, target: int) -> LinkPath:
        """From one host to another one, by their indices."""
        if (source, target) not in self._known:
            links, latency_s = self._hosts[source].route_to(self._hosts[target])
            lanes = tuple(self._lane(link) for link in links if link.get_sharing_policy() != self._fat)
            most = min(link.bandwidth for link in links)
            weight = 1 / latency_s if latency_s and not self._evenly else 1.0
            self._known[source, target] = LinkPath(latency_s=latency_s, lanes=lanes, most_bytes_per_s=most, weight=weight)
        return self._known[source, target]

    def _lane(self, link: Any) -> Lane:
        return self._lanes.setdefault(link, Lane(bandwidth_bytes_per_s=link.bandwidth))


@dataclass(eq=False, slots=True, kw_only=True)
class Flow:
    """A transfer whose latency is over.

    Attributes:
        what: whose it is; for the caller.
        path: its way.
        left_bytes: at `since_s`; from then on it moves at `rate_bytes_per_s`, until `ends_s` if nothing changes.
    """

    what: Any
    path: LinkPath
    left_bytes: float
    rate_bytes_per_s: float = 0.0
    since_s: float = 0.0
    ends_s: float = 0.0

    @property
    def weight(self) -> float:
        """Its share beside others."""
        return self.path.weight

    def left_at(self, now_s: float) -> float:
        """Bytes that have not moved by then."""
        return max(0.0, self.left_bytes - self.rate_bytes_per_s * (now_s - self.since_s))


class Flows:
    """What moves now. After changes, which may be many at a time, `divide` says which rates are others."""

    def __init__(self) -> None:
        self._changed: dict[Lane, None] = {}

    def add(self, flow: Flow) -> None:
        """It begins to move."""
        for lane in flow.path.lanes:
            lane.flows[flow] = None
            self._changed[lane] = None

    def remove(self, flow: Flow) -> None:
        """It moves no more."""
        for lane in flow.path.lanes:
            del lane.flows[flow]
            self._changed[lane] = None

    def divide(self, now_s: float) -> Iterator[Flow]:
        """Those whose rate is another from now on."""
        for together in self._reached():
            for flow, rate in rates_of(together).items():
                if rate != flow.rate_bytes_per_s:
                    flow.left_bytes = flow.left_at(now_s)
                    flow.rate_bytes_per_s, flow.since_s = rate, now_s
                    flow.ends_s = now_s + flow.left_bytes / rate
                    yield flow
        self._changed = {}

    def _reached(self) -> Iterator[list[Flow]]:
        """Flows that a change reaches, in sets of which none shares a link with another."""
        seen: set[Lane] = set()
        for first in self._changed:
            found: dict[Flow, None] = {}
            lanes = [] if first in seen else [first]
            seen.update(lanes)
            while lanes:
                for flow in lanes.pop().flows:
                    if flow not in found:
                        found[flow] = None
                        new = [lane for lane in flow.path.lanes if lane not in seen]
                        lanes += new
                        seen.update(new)
            if found:
                yield list(found)


def rates_of(flows: Iterable[Flow]) -> dict[Flow, float]:
    """The max-min fair rate of each, where no others pass their links."""
    rising = dict.fromkeys(flows)
    if len(rising) == 1:
        return {flow: flow.path.most_bytes_per_s for flow in rising}
    rates: dict[Flow, float] = {}
    left = {lane: lane.bandwidth_bytes_per_s for flow in rising for lane in flow.path.lanes}
    while rising:
        weights: dict[Lane, float] = {}
        for flow in rising:
            for lane in flow.path.lanes:
                weights[lane] = weights.get(lane, 0.0) + flow.weight
        level = min(left[lane] / weight for lane, weight in weights.items())
        level = min(level, min(flow.path.most_bytes_per_s / flow.weight for flow in rising))
        until = level * (1 + _EQUAL)
        full = {lane for lane, weight in weights.items() if left[lane] <= until * weight}
        stopped = [
            flow for flow in rising if flow.path.most_bytes_per_s <= until * flow.weight or not full.isdisjoint(flow.path.lanes)
        ]
        for flow in stopped:
            rates[flow] = level * flow.weight
            del rising[flow]
            for lane in flow.path.lanes:
                left[lane] -= rates[flow]
    return rates
