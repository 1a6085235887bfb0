"""A platform in SimGrid's own XML, read by SimGrid, in a process of its own: what is wrong in a file may end the process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tatami.errors import ClusterError
from tatami.inputs import check_input
from tatami.sim.engine import require_simgrid, simgrid
from tatami.sim.platforms.base import TCP, AbstractPlatform, Cable, Fabric, PlatformPart

MOST_HOSTS = 1000
"""The way between every two of them is read."""
_ASKING = "asking for the way to "
_LAST_WORDS = 2000


@dataclass(frozen=True, kw_only=True)
class XmlPlatform(AbstractPlatform):
    """A file that SimGrid has read; made by `read_xml`.

    Attributes:
        host_names: in their order.
        core_speeds: of a core of each host.
        num_cores: of each host.
        cables: all that ways pass.
        ways: from each host to each other one, by host, the cables by their places in `cables`.
    """

    host_names: tuple[str, ...]
    core_speeds: tuple[float, ...]
    num_cores: tuple[int, ...]
    cables: tuple[Cable, ...]
    ways: tuple[tuple[tuple[int, ...], ...], ...]
    name: str = "platform"
    fabric: Fabric = field(default=TCP)

    @property
    def hosts(self) -> Sequence[str]:
        return self.host_names

    @property
    def speeds_flop_per_s(self) -> Sequence[float]:
        return self.core_speeds

    @cached_property
    def parts(self) -> tuple[PlatformPart, ...]:
        kinds: dict[float, int] = {}
        for speed, cores in zip(self.core_speeds, self.num_cores, strict=True):
            kinds[speed * cores] = kinds.get(speed * cores, 0) + 1
        hosts = [PlatformPart(what="host", count=count, speed_flop_per_s=speed) for speed, count in kinds.items()]
        return (*hosts, PlatformPart(what="link", count=len(self.cables)))

    def way(self, source: int, target: int) -> Sequence[Cable]:
        return [self.cables[index] for index in self.ways[source][target]]


def read_xml(path: Path | str) -> XmlPlatform:
    """The platform that an XML file describes; its hosts in the order of their names, numbers in them as numbers.

    Raises:
        ClusterError: it cannot be read, SimGrid refuses it, it has no host or more than `MOST_HOSTS`, or a host cannot be
            reached from the first: which.
        MissingExtraError: SimGrid is not installed.
    """
    file = Path(path).absolute()
    check_input(file, what="the platform file", error=ClusterError)
    require_simgrid()
    ran = subprocess.run([sys.executable, "-m", __name__, str(file)], capture_output=True, text=True, check=False)
    if ran.returncode:
        # A way that some kinds of zones do not have ends the process.
        before, asked, last = ran.stderr.rpartition(_ASKING)
        what = f"the host {last.splitlines()[0]!r} is unreachable: " if asked else ""
        words = (before if asked else ran.stderr)[-_LAST_WORDS:].strip()
        raise ClusterError(f"{path} cannot be used as a platform: {what}{words or f'SimGrid ended by {ran.returncode}'}")
    found = json.loads(ran.stdout)
    if "problem" in found:
        raise ClusterError(f"{path}: {found['problem']}")
    return XmlPlatform(
        name=file.stem,
        host_names=tuple(found["hosts"]),
        core_speeds=tuple(found["speeds"]),
        num_cores=tuple(found["cores"]),
        cables=tuple(Cable(**cable) for cable in found["cables"]),
        ways=tuple(tuple(tuple(way) for way in ways) for ways in found["ways"]),
    )


def _look(path: str) -> dict[str, Any]:
    """Load the file, and ask for the way from every host to every other one."""
    grid = simgrid()
    engine = grid.Engine(["tatami"])
    try:
        engine.load_platform(path)
    except RuntimeError as error:
        return {"problem": f"cannot be used as a platform: {error}"}
    hosts = sorted(engine.all_hosts, key=lambda host: _natural(host.name))
    if not 1 <= len(hosts) <= MOST_HOSTS:
        return {"problem": f"there must be 1 to {MOST_HOSTS:,} hosts in it, not {len(hosts):,}"}
    links = {link.name: (place, link) for place, link in enumerate(engine.all_links)}
    ways: list[list[list[int]]] = []
    for source in hosts:
        ways.append([])
        for target in hosts:
            if source.name == target.name:
                ways[-1].append([])
                continue
            print(f"{_ASKING}{target.name if source is hosts[0] else source.name}", file=sys.stderr, flush=True)
            passed, _ = source.route_to(target)
            if not passed:
                unreached = target if source is hosts[0] else source
                return {"problem": f"the host {unreached.name!r} is unreachable: no link is on the way to {target.name!r}"}
            ways[-1].append([links[link.name][0] for link in passed])
    fat = grid.Link.SharingPolicy.FATPIPE
    return {
        "hosts": [host.name for host in hosts],
        "speeds": [host.pstate_speed(0) for host in hosts],
        "cores": [host.core_count for host in hosts],
        "cables": [
            {
                "name": name,
                "bandwidth_bytes_per_s": link.bandwidth,
                "latency_s": link.latency,
                "fat": link.get_sharing_policy() == fat,
            }
            for name, (_, link) in links.items()
        ],
        "ways": ways,
    }


def _natural(name: str) -> list[tuple[int, int, str]]:
    """ "node10" after "node9"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


if __name__ == "__main__":
    print(json.dumps(_look(sys.argv[1])))
