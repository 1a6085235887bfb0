"""What a platform is: hosts in an order, and the cables between them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tatami.cluster.link import Link, link_problems
from tatami.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """How links become the time of a transfer: SimGrid's model of a network, whose names its factors have.

    Attributes:
        name: how reports call it.
        latency_factor: of the sum of the links' latencies, after which the first byte moves.
        bandwidth_factor: the part of a link's bandwidth that a transfer alone gets.
        acknowledged_fraction: of a transfer's rate that it takes of the links of the way back.
        window_bytes: a transfer moves at most this in two latencies of its way.
        penalty_bytes: a transfer shares links in proportion to 1 / (latency + the sum of this / bandwidth over its links).
    """

    name: str
    latency_factor: float = 1.0
    bandwidth_factor: float = 1.0
    acknowledged_fraction: float = 0.0
    window_bytes: float = math.inf
    penalty_bytes: float = 0.0


TCP = Fabric(
    name="TCP",
    latency_factor=13.01,
    bandwidth_factor=0.97,
    acknowledged_fraction=0.05,
    window_bytes=4_194_304.0,
    penalty_bytes=20_537.0,
)
"""Latency times 13.01, bandwidth times 0.97, 5 % of it taken by acknowledgements, windows of 4 MiB (SimGrid's LV08)."""
RDMA = Fabric(name="RDMA")
"""Latency + bytes / bandwidth, shared fairly, and nothing else (SimGrid's CM02)."""


@dataclass(frozen=True, kw_only=True)
class Cable:
    """A link as a way from one host to another passes it: one direction, or both where they share the bandwidth.

    Attributes:
        name: of its own on the platform; what has the same name shares one bandwidth.
        bandwidth_bytes_per_s: for all together, or for each transfer where it is `fat`.
        latency_s: of each transfer.
        fat: each transfer has the bandwidth to itself.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    fat: bool = False


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

    def cable(self, name: str, *, up: bool) -> Cable:
        """What a way passes that goes up or down this link."""
        if self.duplex:
            name = f"{name}, {'up' if up else 'down'}"
        return Cable(name=name, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=self.latency_s, fat=self.fat)


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

    @property
    @abstractmethod
    def speeds_flop_per_s(self) -> Sequence[float]:
        """The speed of one core of each host, in the order of `hosts`."""

    @abstractmethod
    def way(self, source: int, target: int) -> Sequence[Cable]:
        """The cables from one host to another one, by their indices, in their order."""

    @property
    def shares_evenly(self) -> bool:
        """Whether transfers that meet on a link get equal parts of it. With SimGrid's models, the nearer gets more."""
        return False
