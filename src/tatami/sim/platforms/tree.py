"""Clusters of clusters: groups of machines behind a backbone, to any depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tatami.cluster.cluster import MOST_PROCESSORS
from tatami.cluster.speed_table import speed_problem
from tatami.errors import ClusterError
from tatami.sim.engine import simgrid
from tatami.sim.platforms.base import TCP, AbstractPlatform, Fabric, PlatformPart, Wire

_MOST_CORES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class MachineGroup:
    """`count` machines that are alike, or `count` copies of a cluster of other groups.

    Attributes:
        name: of each; `{i}` stands for its number, which is put at the end where it is not in the name and there are several.
        count: how many.
        link: from each to the backbone that it is on.
        backbone: what the members of one copy share; every path into, out of and through a copy takes it.
        groups: the members of one copy; none for machines.
        speed_flop_per_s: of a machine.
        cores: of a machine.
    """

    name: str
    count: int = 1
    link: Wire | None = None
    backbone: Wire | None = None
    groups: tuple[MachineGroup, ...] = ()
    speed_flop_per_s: float = 1.0
    cores: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.count < 1:
            problems.append(f"{self.name}.count: must be >= 1, not {self.count}")
        if problem := speed_problem(self.speed_flop_per_s):
            problems.append(f"{self.name}.speed: {problem}")
        if not 1 <= self.cores <= _MOST_CORES:
            problems.append(f"{self.name}.cores: must be from 1 to {_MOST_CORES:,}, not {self.cores}")
        if self.backbone is not None and not self.groups:
            problems.append(f"{self.name}.backbone: a machine has none; it is of what holds groups")
        problems += _too_many((self,)) or _taken_twice(self.groups, path=f"{self.name}.")
        if problems:
            raise ClusterError("this platform is invalid:", problems=problems)

    @property
    def names(self) -> list[str]:
        """Of the copies."""
        pattern = self.name if "{i}" in self.name or self.count == 1 else self.name + "{i}"
        return [pattern.replace("{i}", str(index)) for index in range(self.count)]

    @property
    def num_hosts(self) -> int:
        return self.count * (sum(group.num_hosts for group in self.groups) if self.groups else 1)


@dataclass(frozen=True, kw_only=True)
class Tree(AbstractPlatform):
    """Groups on one backbone.

    A path goes from a machine through its link, the backbones and links above it, the backbone where both sides meet, and down
    the other side in the same way. Hosts are named by their place, as "cluster3/node7".
    """

    name: str
    groups: tuple[MachineGroup, ...]
    backbone: Wire | None = None
    fabric: Fabric = field(default=TCP)

    def __post_init__(self) -> None:
        problems = [] if self.groups else ["groups: there is none"]
        problems += _too_many(self.groups) or _taken_twice(self.groups, path="")
        problems += _wire_problems(self.groups, backbone=self.backbone, above=0, path="")
        if problems:
            raise ClusterError(f"the platform {self.name} is invalid:", problems=problems)

    @cached_property
    def hosts(self) -> Sequence[str]:
        return tuple(_host_names(self.groups, path=""))

    @property
    def parts(self) -> tuple[PlatformPart, ...]:
        lines = []
        if self.backbone is not None:
            lines.append(PlatformPart.wires("backbone", self.backbone))
        return (*lines, *_parts(self.groups, copies=1, depth=0))

    def build(self, engine: Any) -> list[Any]:
        root = engine.netzone_root.add_netzone_star(self.name)
        # SimGrid looks every new name up in all zones that there are: links are made while there is one.
        links = dict(_links(root, self.groups, path="", backbone=self.backbone))
        hosts = list(_build(root, self.groups, path="", links=links))
        root.seal()
        return hosts


def _links(root: Any, groups: Sequence[MachineGroup], *, path: str, backbone: Wire | None) -> Iterator[tuple[str, Any]]:
    """All links below a zone, by their names."""
    grid = simgrid()
    if backbone is not None:
        yield f"{path}backbone", backbone.make(root, f"{path}backbone", grid=grid)
    for group in groups:
        for name in group.names:
            if group.link is not None:
                yield f"{path}{name}/link", group.link.make(root, f"{path}{name}/link", grid=grid)
            yield from _links(root, group.groups, path=f"{path}{name}/", backbone=group.backbone)


def _build(zone: Any, groups: Sequence[MachineGroup], *, path: str, links: dict[str, Any]) -> Iterator[Any]:
    """The hosts below a zone. A backbone is a link on every host's way up, which a path that goes up and down takes once."""
    for group in groups:
        for name in group.names:
            way = [links[link] for link in (f"{path}{name}/link", f"{path}backbone") if link in links]
            if not group.groups:
                host = zone.add_host(path + name, group.speed_flop_per_s)
                host.core_count = group.cores
                host.seal()
                zone.add_route(host, None, way, True)
                yield host
                continue
            inner = zone.add_netzone_star(path + name)
            inner.set_gateway(inner.add_router(f"{path}{name}/router"))
            yield from _build(inner, group.groups, path=f"{path}{name}/", links=links)
            inner.seal()
            zone.add_route(inner, None, way, True)


def _host_names(groups: Sequence[MachineGroup], *, path: str) -> Iterator[str]:
    for group in groups:
        for name in group.names:
            if group.groups:
                yield from _host_names(group.groups, path=f"{path}{name}/")
            else:
                yield path + name


def _parts(groups: Sequence[MachineGroup], *, copies: int, depth: int) -> Iterator[PlatformPart]:
    for group in groups:
        count, indent = copies * group.count, "  " * depth
        if group.groups:
            yield PlatformPart(what=f"{indent}{group.name}", count=count)
            if group.link is not None:
                yield PlatformPart.wires(f"{indent}  link", group.link, count=count)
            if group.backbone is not None:
                yield PlatformPart.wires(f"{indent}  backbone", group.backbone, count=count)
            yield from _parts(group.groups, copies=count, depth=depth + 1)
        else:
            yield PlatformPart(what=f"{indent}{group.name}", count=count, speed_flop_per_s=group.speed_flop_per_s * group.cores)
            if group.link is not None:
                yield PlatformPart.wires(f"{indent}  link", group.link, count=count)


def _too_many(groups: Sequence[MachineGroup]) -> list[str]:
    """Asked before any name of a machine is made."""
    num_hosts = sum(group.num_hosts for group in groups)
    return [f"{num_hosts:,} machines are too many; at most {MOST_PROCESSORS:,}"] if num_hosts > MOST_PROCESSORS else []


def _taken_twice(groups: Sequence[MachineGroup], *, path: str) -> list[str]:
    taken: dict[str, str] = {}
    problems = []
    for group in groups:
        for name in group.names:
            if name in taken:
                problems.append(f"{path}{group.name}: the name {name!r} is taken already, by {path}{taken[name]}")
                break
            taken[name] = group.name
    return problems


def _wire_problems(groups: Sequence[MachineGroup], *, backbone: Wire | None, above: int, path: str) -> list[str]:
    """Machines without any link to the others, and invalid backbones."""
    problems = []
    if backbone is not None and backbone.duplex:
        problems.append(f"{path}backbone: cannot be duplex: it is passed once in either direction; links can")
    for group in groups:
        wires = above + (backbone is not None) + (group.link is not None)
        place = f"{path}{group.names[0]}"
        if group.groups:
            problems += _wire_problems(group.groups, backbone=group.backbone, above=wires, path=f"{place}/")
        elif not wires:
            problems.append(f"{place}: is unreachable: there is neither a link nor a backbone between it and the others")
    return problems
