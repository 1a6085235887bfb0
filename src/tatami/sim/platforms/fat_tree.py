"""A fat tree of two levels with full bisection: no cable is oversubscribed, whichever hosts communicate."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from tatami.cluster.cluster import MOST_PROCESSORS
from tatami.cluster.speed_table import speed_problem
from tatami.errors import ClusterError
from tatami.sim.platforms.base import RDMA, AbstractPlatform, Fabric, PlatformPart, Wire

_MOST_PER_SWITCH = 24
_HEAD = '<?xml version="1.0"?>\n<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'


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
    def meet_few(self) -> bool:
        return self.fabric == RDMA

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

    def build(self, engine: Any) -> list[Any]:
        down, up = f"{self.per_switch},{self.switches}", f"1,{self.per_switch}"
        attributes = {
            "id": self.name,
            "prefix": "node",
            "radical": f"0-{self.per_switch * self.switches - 1}",
            "suffix": "",
            "speed": f"{self.speed_flop_per_s!r}f",
            "bw": f"{self.link.bandwidth_bytes_per_s!r}Bps",
            "lat": f"{self.link.latency_s!r}s",
            "sharing_policy": "SPLITDUPLEX",
            "topology": "FAT_TREE",
            "topo_parameters": f"2;{down};{up};1,1",
        }
        cluster = " ".join(f"{key}={quoteattr(value)}" for key, value in attributes.items())
        text = f'{_HEAD}<platform version="4.1"><zone id="all" routing="Full"><cluster {cluster}/></zone></platform>\n'
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "platform.xml"
            file.write_text(text, encoding="utf-8")
            engine.load_platform(str(file))
        return [engine.host_by_name(name) for name in self.hosts]
