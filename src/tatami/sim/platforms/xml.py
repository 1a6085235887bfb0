"""A platform in SimGrid's own XML."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tatami.errors import ClusterError, SimulationError
from tatami.inputs import check_input
from tatami.sim.engine import simgrid
from tatami.sim.platforms.base import TCP, AbstractPlatform, Fabric, PlatformPart
from tatami.sim.processes import Runs

_ASKING = "asking for the way to "


@dataclass(frozen=True, kw_only=True)
class XmlPlatform(AbstractPlatform):
    """A file that SimGrid reads; made by `read_xml`, which knows what is in it."""

    path: Path
    host_names: tuple[str, ...]
    speeds_flop_per_s: tuple[float, ...]
    num_links: int
    name: str = "platform"
    fabric: Fabric = field(default=TCP)

    @property
    def hosts(self) -> Sequence[str]:
        return self.host_names

    @property
    def parts(self) -> tuple[PlatformPart, ...]:
        kinds: dict[float, int] = {}
        for speed in self.speeds_flop_per_s:
            kinds[speed] = kinds.get(speed, 0) + 1
        hosts = [PlatformPart(what="host", count=count, speed_flop_per_s=speed) for speed, count in kinds.items()]
        return (*hosts, PlatformPart(what="link", count=self.num_links))

    def build(self, engine: Any) -> list[Any]:
        engine.load_platform(str(self.path))
        return [engine.host_by_name(name) for name in self.host_names]


@dataclass(frozen=True, kw_only=True)
class _Contents:
    names: tuple[str, ...]
    speeds: tuple[float, ...]
    num_links: int


def read_xml(path: Path | str) -> XmlPlatform:
    """The platform that an XML file describes; its hosts in the order of their names, numbers in them as numbers.

    Raises:
        ClusterError: it cannot be read, SimGrid refuses it, it has no host, or a host cannot be reached from the first: which.
        MissingExtraError: SimGrid is not installed.
    """
    file = Path(path).absolute()
    check_input(file, what="the platform file", error=ClusterError)
    try:
        with Runs(cores=1) as runs:
            contents = runs.call(_look, str(file))
    except SimulationError as error:
        # A way that some kinds of zones do not have ends the process.
        _, asked, last = str(error).rpartition(_ASKING)
        what = f"the host {last.splitlines()[0]!r} is unreachable: " if asked else ""
        raise ClusterError(f"{path} cannot be used as a platform: {what}{error}") from None
    if not contents.names:
        raise ClusterError(f"{path} has no host in it")
    return XmlPlatform(
        path=file, name=file.stem, host_names=contents.names, speeds_flop_per_s=contents.speeds, num_links=contents.num_links
    )


def _look(path: str) -> _Contents:
    """Load it, and ask for the way from the first host to every other and back."""
    engine = simgrid().Engine(["tatami"])
    try:
        engine.load_platform(path)
    except RuntimeError as error:
        raise ClusterError(f"{path} cannot be used as a platform: {error}") from None
    hosts = sorted(engine.all_hosts, key=lambda host: _natural(host.name))
    for host in hosts[1:]:
        print(f"{_ASKING}{host.name}", file=sys.stderr, flush=True)
        for one, other in ((hosts[0], host), (host, hosts[0])):
            links, _ = one.route_to(other)
            if not links:
                raise ClusterError(f"{path}: the host {host.name!r} is unreachable: no link is on the way to {hosts[0].name!r}")
    return _Contents(
        names=tuple(host.name for host in hosts),
        speeds=tuple(host.pstate_speed(0) * host.core_count for host in hosts),
        num_links=len(engine.all_links),
    )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """ "node10" after "node9"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
