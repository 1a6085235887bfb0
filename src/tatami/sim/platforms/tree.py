"""Clusters of clusters: groups of machines behind a backbone, to any depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tatami.cluster.cluster import MOST_PROCESSORS
from tatami.cluster.speed_table import speed_problem
from tatami.errors import ClusterError
from tatami.sim.platforms.base import TCP, AbstractPlatform, Cable, Fabric, PlatformPart, Wire

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
        """Names of the copies."""
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
        return tuple(place.name for place in self._places)

    @property
    def parts(self) -> tuple[PlatformPart, ...]:
        lines = []
        if self.backbone is not None:
            lines.append(PlatformPart.wires("backbone", self.backbone))
        return (*lines, *_parts(self.groups, copies=1, depth=0))

    @cached_property
    def speeds_flop_per_s(self) -> Sequence[float]:
        return tuple(place.speed_flop_per_s for place in self._places)

    def way(self, source: int, target: int) -> Sequence[Cable]:
        one, other = self._places[source].upwards, self._places[target].upwards
        shared = 0
        while shared < min(len(one), len(other)) and one[-1 - shared] is other[-1 - shared]:
            shared += 1
        meeting = one[-shared]
        across = [] if meeting.backbone is None else [meeting.backbone.cable(f"{meeting.name}backbone", up=True)]
        down = _climb(other[:-shared], up=False)
        return [*_climb(one[:-shared], up=True), *across, *reversed(down)]

    @cached_property
    def _places(self) -> Sequence[_Place]:
        root = _Place(name="", above=None, link=None, backbone=self.backbone)
        return tuple(_places(self.groups, above=root))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Place:
    """A machine, a copy of a group (its name ends in a slash), or the whole platform (which has no name)."""

    name: str
    above: _Place | None
    link: Wire | None
    backbone: Wire | None
    speed_flop_per_s: float = 0.0

    @cached_property
    def upwards(self) -> Sequence[_Place]:
        """This place and all above it."""
        return (self, *(self.above.upwards if self.above is not None else ()))


def _places(groups: Sequence[MachineGroup], *, above: _Place) -> Iterator[_Place]:
    """The machines below a place, in their order."""
    for group in groups:
        for name in group.names:
            if group.groups:
                inner = _Place(name=f"{above.name}{name}/", above=above, link=group.link, backbone=group.backbone)
                yield from _places(group.groups, above=inner)
            else:
                speed = group.speed_flop_per_s
                yield _Place(name=above.name + name, above=above, link=group.link, backbone=None, speed_flop_per_s=speed)


def _climb(places: Sequence[_Place], *, up: bool) -> list[Cable]:
    """What a way passes from a machine to below the place where both sides meet; or the same backwards, in that order."""
    cables = []
    for place in places:
        if place.backbone is not None:
            cables.append(place.backbone.cable(f"{place.name}backbone", up=up))
        if place.link is not None:
            cables.append(place.link.cable(f"{place.name} link", up=up))
    return cables


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
