"""Links divided among the transfers that pass them, as SimGrid's models CM02 and LV08 do.

Where a transfer begins or ends, those are looked at that share a link with it, those that share one with these, and so on.
Where transfers meet few others, as in a fat tree that each rank sends one message into, that is a handful.

Bandwidth is max-min fair. The rates of transfers rise together, each in proportion to its weight, until a link is full; those
that pass it keep their rate, and the others go on. A transfer weighs 1 / latency (`Fabric.penalty_bytes` says what else): of
two on one link, the nearer gets more. Where latencies were measured (`AbstractPlatform.shares_evenly`), all weigh the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tatami.sim.platforms.base import AbstractPlatform, Cable

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
        lanes: the links that others may share, and which part of a transfer's rate it takes of each.
        most_bytes_per_s: what a transfer alone may have: the least bandwidth of all, or what its window allows.
        weight: of a transfer that goes this way, beside others.
    """

    latency_s: float
    lanes: Mapping[Lane, float]
    most_bytes_per_s: float
    weight: float = 1.0

    @property
    def alone_bytes_per_s(self) -> float:
        """The rate of a transfer that meets no other."""
        return min([self.most_bytes_per_s, *(lane.bandwidth_bytes_per_s / part for lane, part in self.lanes.items())])


class LinkPaths:
    """The ways of a platform, each looked up once."""

    def __init__(self, platform: AbstractPlatform) -> None:
        self._platform = platform
        self._lanes: dict[str, Lane] = {}
        self._known: dict[tuple[int, int], LinkPath] = {}

    def of(self, source: int, target: int) -> LinkPath:
        """From one host to another one, by their indices."""
        if (source, target) not in self._known:
            self._known[source, target] = self._path(source, target)
        return self._known[source, target]

    def _path(self, source: int, target: int) -> LinkPath:
        fabric, way = self._platform.fabric, self._platform.way(source, target)
        taken: dict[Lane, float] = {}
        back = self._platform.way(target, source) if fabric.acknowledged_fraction else ()
        for cables, part in ((way, 1.0), (back, fabric.acknowledged_fraction)):
            for cable in cables:
                if not cable.fat:
                    lane = self._lanes.setdefault(cable.name, Lane(bandwidth_bytes_per_s=self._capacity(cable)))
                    taken[lane] = taken.get(lane, 0.0) + part
        latency_s = sum(cable.latency_s for cable in way)
        most = min((fabric.bandwidth_factor * cable.bandwidth_bytes_per_s for cable in way), default=math.inf)
        if latency_s:
            most = min(most, fabric.window_bytes / (2 * latency_s))
        penalty_s = latency_s + sum(fabric.penalty_bytes / cable.bandwidth_bytes_per_s for cable in way)
        return LinkPath(
            latency_s=fabric.latency_factor * latency_s,
            lanes=taken,
            most_bytes_per_s=most,
            weight=1 / penalty_s if penalty_s and not self._platform.shares_evenly else 1.0,
        )

    def _capacity(self, cable: Cable) -> float:
        return self._platform.fabric.bandwidth_factor * cable.bandwidth_bytes_per_s


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

    def remove(self, flow: Flow, *, now_s: float) -> None:
        """It moves no more, or not now."""
        flow.left_bytes = flow.left_at(now_s)
        flow.rate_bytes_per_s, flow.since_s = 0.0, now_s
        for lane in flow.path.lanes:
            lane.flows.pop(flow, None)
            self._changed[lane] = None

    def divide(self, now_s: float) -> Iterator[Flow]:
        """The flows whose rate changes now."""
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
        return {flow: flow.path.alone_bytes_per_s for flow in rising}
    rates: dict[Flow, float] = {}
    left = {lane: lane.bandwidth_bytes_per_s for flow in rising for lane in flow.path.lanes}
    while rising:
        weights: dict[Lane, float] = {}
        for flow in rising:
            for lane, part in flow.path.lanes.items():
                weights[lane] = weights.get(lane, 0.0) + part * flow.weight
        # Example: x takes lane A (10 bytes/s), z takes B (4 bytes/s), and y takes both. All rise to 2, where B is full: y and z
        # keep 2. x goes on alone with the 8 that are left of A.
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
            for lane, part in flow.path.lanes.items():
                left[lane] -= part * rates[flow]
    return rates
