"""A fat tree of two levels with full bisection: no cable is oversubscribed, whichever hosts communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tatami.cluster.cluster import MOST_PROCESSORS
from tatami.cluster.speed_table import speed_problem
from tatami.errors import ClusterError
from tatami.sim.platforms.base import RDMA, AbstractPlatform, Cable, Fabric, PlatformPart, Wire

_MOST_PER_SWITCH = 24


@dataclass(frozen=True, kw_only=True)
class FatTree(AbstractPlatform):
    """`nodes` machines on leaf switches, each of which has as many cables to core switches as machines.

    A path is node - leaf switch - node, or node - leaf - core - leaf - node; each cable has `link`'s latency and, in each
    direction, its bandwidth.
    """

    name: str
    nodes: int
    link: Wire
    speed_flop_per_s: float = 1.0
    fabric: Fabric = field(default=RDMA)

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_PROCESSORS:
            raise ClusterError(f"a fat tree has 1 to {MOST_PROCESSORS:,} nodes, not {self.nodes}")
        if problem := speed_problem(self.speed_flop_per_s):
            raise ClusterError(f"the speed of a node {problem}")

    @cached_property
    def hosts(self) -> Sequence[str]:
        return tuple(f"node{index}" for index in range(self.nodes))

    @property
    def per_switch(self) -> int:
        """Machines on one leaf switch."""
        return min(_MOST_PER_SWITCH, self.nodes)

    @property
    def switches(self) -> int:
        """Leaf switches; the last may have ports to spare."""
        return -(-self.nodes // self.per_switch)

    @property
    def parts(self) -> tuple[PlatformPart, ...]:
        return (
            PlatformPart(what="node", count=self.nodes, speed_flop_per_s=self.speed_flop_per_s),
            PlatformPart.wires("  cable to a leaf switch", self.link, count=self.nodes),
            PlatformPart(what="leaf switch", count=self.switches),
            PlatformPart.wires("  cable to a core switch", self.link, count=self.switches * self.per_switch),
            PlatformPart(what="core switch", count=self.per_switch),
        )

    @cached_property
    def speeds_flop_per_s(self) -> Sequence[float]:
        return (self.speed_flop_per_s,) * self.nodes

    def way(self, source: int, target: int) -> Sequence[Cable]:
        """By the core switch that the target's place on its leaf switch names: each target has a way down of its own."""
        leaf, other = source // self.per_switch, target // self.per_switch
        up, down = self._cable(f"node{source}, up"), self._cable(f"node{target}, down")
        if leaf == other:
            return (up, down)
        core = target % self.per_switch
        return (up, self._cable(f"leaf{leaf} to core{core}"), self._cable(f"core{core} to leaf{other}"), down)

    def _cable(self, name: str) -> Cable:
        return Cable(name=name, bandwidth_bytes_per_s=self.link.bandwidth_bytes_per_s, latency_s=self.link.latency_s)
