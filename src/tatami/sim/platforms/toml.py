"""Platforms as files: a cluster.toml (processors and links), groups with backbones, or SimGrid's XML.

name = "two clusters"
fabric = "tcp"                                        # or "rdma": plain latency and bandwidth; may be left out
backbone = { bandwidth = "0.5 TB/s", latency = "500 us" }

[[groups]]
name = "cluster{i}"                                   # cluster0, cluster1, ...
count = 100
backbone = { bandwidth = "5 GB/s", latency = "500 us" }

[[groups.groups]]                                     # in each of them
name = "node{i}"
count = 100
speed = "1 Gflop/s"
cores = 1
link = { bandwidth = "125 MB/s", latency = "50 us", duplex = false }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tatami.cluster.toml import cluster_of
from tatami.errors import ClusterError, InputError, shortened
from tatami.inputs import read_toml
from tatami.sim.platforms.base import RDMA, TCP, AbstractPlatform, Wire
from tatami.sim.platforms.flat import ClusterPlatform
from tatami.sim.platforms.tree import MachineGroup, Tree
from tatami.sim.platforms.xml import read_xml
from tatami.units import parse_bandwidth, parse_duration, parse_speed

T = TypeVar("T")
_FABRICS = {"tcp": TCP, "rdma": RDMA}
_TOP_KEYS = ("name", "fabric", "backbone", "groups")
_GROUP_KEYS = ("name", "count", "speed", "cores", "link", "backbone", "groups")
_DEEPEST = 20
_WIRE_KEYS = ("bandwidth", "latency", "duplex", "fat")


def read_platform(path: Path | str) -> AbstractPlatform:
    """The platform that a file describes: TOML with `groups` or with `processors`, or SimGrid's XML.

    Raises:
        ClusterError: it cannot be read, or describes no platform: every fault, each with its path, as in
            "groups[0].groups[1].speed: must be > 0, not -1".
    """
    file = Path(path)
    if file.suffix == ".xml":
        return read_xml(file)
    tables = read_toml(file, what="the platform file", error=ClusterError)
    if "groups" not in tables:
        return ClusterPlatform(cluster=cluster_of(tables, source=path), name=file.stem)
    reading = _Reading()
    tree = reading.tree(tables, default_name=file.stem)
    if reading.problems or tree is None:
        raise ClusterError(f"{path} cannot be used as a platform:", problems=reading.problems)
    return tree


class _Reading:
    """Reads tables into a tree, and goes on after a fault to find the others."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def tree(self, tables: Mapping[str, Any], *, default_name: str) -> Tree | None:
        self._refuse_unknown(tables, _TOP_KEYS, path="")
        fabric = tables.get("fabric", "tcp")
        if fabric not in _FABRICS:
            self.problems.append(f"fabric: must be one of {', '.join(_FABRICS)}, not {shortened(repr(fabric))}")
        backbone = self._wire(tables.get("backbone"), path="backbone")
        groups = self._groups(tables["groups"], path="groups")
        if self.problems:
            return None
        name = str(tables.get("name", default_name))
        return self._made(lambda: Tree(name=name, groups=groups, backbone=backbone, fabric=_FABRICS[fabric]), path="")

    def _groups(self, value: object, *, path: str) -> tuple[MachineGroup, ...]:
        if not isinstance(value, list) or not value:
            self.problems.append(f"{path}: must be a list of tables: head each with double brackets")
            return ()
        if path.count(".") >= _DEEPEST:
            self.problems.append(f"{shortened(path)}: groups are nested more than {_DEEPEST} deep")
            return ()
        groups = [self._group(table, path=f"{path}[{index}]") for index, table in enumerate(value)]
        return tuple(group for group in groups if group is not None)

    def _group(self, table: object, *, path: str) -> MachineGroup | None:
        if not isinstance(table, dict):
            self.problems.append(f"{path}: must be a table, not {shortened(repr(table))}")
            return None
        before = len(self.problems)
        self._refuse_unknown(table, _GROUP_KEYS, path=path)
        name = table.get("name")
        if not isinstance(name, str) or not name.strip():
            self.problems.append(f"{path}.name: must be a text that is not empty, not {shortened(repr(name))}")
        count = self._count(table.get("count", 1), path=f"{path}.count")
        cores = self._count(table.get("cores", 1), path=f"{path}.cores")
        speed = self._positive(table.get("speed", 1.0), parse_speed, path=f"{path}.speed")
        link = self._wire(table.get("link"), path=f"{path}.link")
        backbone = self._wire(table.get("backbone"), path=f"{path}.backbone")
        groups = self._groups(table["groups"], path=f"{path}.groups") if "groups" in table else ()
        if groups and ("speed" in table or "cores" in table):
            self.problems.append(f"{path}: speed and cores are of machines; this holds groups")
        if len(self.problems) > before:
            return None
        return self._made(
            lambda: MachineGroup(
                name=str(name), count=count, cores=cores, speed_flop_per_s=speed, link=link, backbone=backbone, groups=groups
            ),
            path=path,
        )

    def _wire(self, value: object, *, path: str) -> Wire | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            self.problems.append(
                f'{path}: must be a table, as {{ bandwidth = "1 Gbit/s", latency = "50 us" }}, not {shortened(repr(value))}'
            )
            return None
        self._refuse_unknown(value, _WIRE_KEYS, path=path)
        missing = [key for key in ("bandwidth", "latency") if key not in value]
        self.problems += [f"{path}.{key}: is missing" for key in missing]
        if missing:
            return None
        before = len(self.problems)
        bandwidth = self._positive(value["bandwidth"], parse_bandwidth, path=f"{path}.bandwidth")
        latency = self._parsed(value["latency"], parse_duration, path=f"{path}.latency")
        flags = {key: value.get(key, False) for key in ("duplex", "fat")}
        self.problems += [f"{path}.{key}: must be true or false" for key, flag in flags.items() if not isinstance(flag, bool)]
        if len(self.problems) > before:
            return None
        return Wire(bandwidth_bytes_per_s=bandwidth, latency_s=latency, **flags)

    def _count(self, value: object, *, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.problems.append(f"{path}: must be a whole number >= 1, not {shortened(repr(value))}")
            return 1
        return value

    def _positive(self, value: object, parse: Any, *, path: str) -> float:
        number = self._parsed(value, parse, path=path)
        if number == 0:
            self.problems.append(f"{path}: must be > 0, not {shortened(repr(value))}")
        return number

    def _parsed(self, value: object, parse: Any, *, path: str) -> float:
        try:
            return float(parse(value))
        except InputError as error:
            self.problems.append(f"{path}: {error}")
            return 1.0

    def _refuse_unknown(self, table: Mapping[str, Any], known: tuple[str, ...], *, path: str) -> None:
        for key in sorted(set(table) - set(known)):
            self.problems.append(f"{path}.{key}".lstrip(".") + f": unknown key; known are {', '.join(known)}")

    def _made(self, make: Callable[[], T], *, path: str) -> T | None:
        try:
            return make()
        except ClusterError as error:
            self.problems += [f"{path}: {problem}".removeprefix(": ") for problem in error.problems or (str(error),)]
            return None
