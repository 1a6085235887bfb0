"""What a platform is: hosts in an order, and how they are described to SimGrid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tatami.cluster.cluster import Link, link_problems
from tatami.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """How SimGrid turns links into the time of a transfer.

    Attributes:
        name: how reports call it.
        settings: of SimGrid, as it names them.
    """

    name: str
    settings: tuple[tuple[str, str], ...]

    @property
    def arguments(self) -> list[str]:
        return [f"--cfg={key}:{value}" for key, value in self.settings]


# Without "Full", SimGrid 4.1 updates only what it thinks has changed, and some of many flows that begin together run as if
# alone: of 1,000 pulls behind backbones 900 ended after 8.3 s instead of 21.7. It costs no time here.
_ALL_FLOWS = ("network/optim", "Full")
TCP = Fabric(name="TCP", settings=(("network/model", "LV08"), _ALL_FLOWS))
"""Latency times 13.01, bandwidth times 0.97, 5 % of it taken by acknowledgements, windows of 4 MiB (SimGrid's LV08)."""
RDMA = Fabric(
    name="RDMA", settings=(("network/model", "CM02"), ("network/TCP-gamma", "0"), ("network/crosstraffic", "0"), _ALL_FLOWS)
)
"""Latency + bytes / bandwidth, shared fairly, and nothing else (SimGrid's CM02)."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A link, or a backbone that several links end in.

    Attributes:
        bandwidth_bytes_per_s: that all who send through it at a time share.
        latency_s: of each transfer.
        duplex: both ways have the bandwidth to themselves; else they share it.
        fat: each transfer has the bandwidth to itself.

    Raises:
        ClusterError: a bandwidth that is not positive, or a latency that is negative.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    duplex: bool = False
    fat: bool = False

    def __post_init__(self) -> None:
        if problems := link_problems(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=self.latency_s):
            raise ClusterError("; ".join(problems.values()))

    def make(self, zone: Any, name: str, *, grid: Any) -> Any:
        """The link in SimGrid, as a route from below upwards takes it."""
        if self.duplex:
            link = zone.add_split_duplex_link(name, self.bandwidth_bytes_per_s)
            link.set_latency(self.latency_s).seal()
            return grid.LinkInRoute(link, grid.LinkInRoute.Direction.UP)
        link = zone.add_link(name, self.bandwidth_bytes_per_s).set_latency(self.latency_s)
        if self.fat:
            link.set_sharing_policy(grid.Link.SharingPolicy.FATPIPE, None)
        return grid.LinkInRoute(link.seal())


@dataclass(frozen=True, kw_only=True)
class PlatformPart:
    """One line of what `tatami simulate platform` says: some machines that are alike, or what joins them."""

    what: str
    count: int
    speed_flop_per_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None

    @classmethod
    def wires(cls, what: str, link: Link | Wire, *, count: int = 1) -> Self:
        """So many of a link."""
        return cls(what=what, count=count, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s)


class AbstractPlatform(ABC):
    """Machines and a network. Hosts are known by their index, in an order that is always the same.

    Attributes:
        name: how reports call it.
        fabric: how transfers are timed.
    """

    name: str
    fabric: Fabric

    @property
    @abstractmethod
    def hosts(self) -> Sequence[str]:
        """The names of the hosts, in their order."""

    @property
    @abstractmethod
    def parts(self) -> tuple[PlatformPart, ...]:
        """What there is, for people."""

    def unshared(self, source: int, target: int) -> Link | None:  # noqa: ARG002 - nothing is known of it
        """The link from one host to another that every transfer has to itself; None where transfers may share something."""
        return None

    @property
    def only_link(self) -> Link | None:
        """The link that every transfer has to itself, whichever two hosts it is between; None where there is no such."""
        return None

    @property
    def shares_evenly(self) -> bool:
        """Whether transfers that meet on a link get equal parts of it. With SimGrid's models, the nearer gets more."""
        return False

    @property
    def meet_few(self) -> bool:
        """Whether transfers share their links with few others where each host has a few, and links are as in `sim.flows`."""
        return False

    @abstractmethod
    def build(self, engine: Any) -> list[Any]:
        """Tell a SimGrid engine of it, and return its hosts in the order of `hosts`."""
