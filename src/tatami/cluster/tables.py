"""The tables of a cluster's TOML file: their types, and the faults of single values, each with its path."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, NewType, TypeVar

import cattrs
from cattrs.gen import make_dict_structure_fn

from tatami.cluster.cluster import MOST_PROCESSORS, Link, Processor, link_problems
from tatami.cluster.speed_table import SpeedTable, points_problem
from tatami.cluster.speeds import speed_problem
from tatami.errors import InputError, shortened
from tatami.units import parse_bandwidth, parse_duration, parse_flop, parse_size, parse_speed

_LONGEST_NAME = 255
_MOST_COMPARED = 1000
_Number = TypeVar("_Number", int, float)
_Name = NewType("_Name", str)
_Speed = NewType("_Speed", float)
_Spread = NewType("_Spread", float)
_Memory = NewType("_Memory", int)
_Count = NewType("_Count", int)
_Bandwidth = NewType("_Bandwidth", float)
_Latency = NewType("_Latency", float)


@dataclass(frozen=True, kw_only=True)
class LinkTable:
    bandwidth: _Bandwidth
    latency: _Latency

    def __post_init__(self) -> None:
        if problems := link_problems(bandwidth_bytes_per_s=self.bandwidth, latency_s=self.latency):
            raise InputError("; ".join(problems.values()))

    def link(self) -> Link:
        return Link(bandwidth_bytes_per_s=self.bandwidth, latency_s=self.latency)


@dataclass(frozen=True, kw_only=True)
class HostsLinkTable(LinkTable):
    hosts: list[_Name]


@dataclass(frozen=True, kw_only=True)
class ProcessorTable:
    name: _Name
    speed: _Speed
    spread: _Spread | None = None
    message: _Latency | None = None
    copy: _Bandwidth | None = None
    call: _Latency | None = None
    host: _Name = _Name("localhost")
    memory: _Memory | None = None
    count: _Count | None = None

    def processors(self) -> tuple[Processor, ...]:
        names = numbered(self.name, count=self.count, append=True)
        hosts = numbered(self.host, count=self.count, append=False)
        return tuple(
            Processor(
                name=name,
                speed=self.speed,
                spread=self.spread,
                message_s=self.message or 0.0,
                copy_bytes_per_s=self.copy or math.inf,
                call_s=self.call or 0.0,
                host=host,
                memory_bytes=self.memory,
            )
            for name, host in zip(names, hosts, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    processors: list[ProcessorTable]
    local: LinkTable | None = None
    network: LinkTable | None = None
    links: list[HostsLinkTable] | None = None


def structure(tables: Mapping[str, Any]) -> tuple[ClusterFile | None, list[str]]:
    """The file as typed tables, and no faults; or None, and one line for every fault of a value."""
    try:
        return _converter().structure(tables, ClusterFile), []
    except (cattrs.BaseValidationError, InputError) as error:
        return None, list(problems_of(error))


def numbered(name: str, *, count: int | None, append: bool) -> list[str]:
    """The `count` names of a group: `{i}` stands for 0, 1, ...; where it is not in `name`, `append` puts it at the end."""
    if count is None:
        return [name]
    if append and "{i}" not in name:
        name += "{i}"
    return [name.replace("{i}", str(index)) for index in range(count)]


@cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
    converter.register_structure_hook(_Name, lambda value, _: name_of(value))
    converter.register_structure_hook(_Speed, lambda value, _: _speed(value))
    converter.register_structure_hook(_Spread, lambda value, _: _spread(value))
    converter.register_structure_hook(_Memory, lambda value, _: positive(value, parse_size(value)))
    converter.register_structure_hook(_Count, lambda value, _: count_of(value))
    converter.register_structure_hook(_Bandwidth, lambda value, _: positive(value, parse_bandwidth(value)))
    converter.register_structure_hook(_Latency, lambda value, _: parse_duration(value))
    # From the leaves up: cattrs looks up the hooks of a table's fields when the table's own is made.
    _register_list(converter, list[_Name], size=2)
    for table in (LinkTable, HostsLinkTable, ProcessorTable):
        converter.register_structure_hook(table, table_hook(table, converter))
    _register_list(converter, list[ProcessorTable], size=None)
    _register_list(converter, list[HostsLinkTable], size=None)
    converter.register_structure_hook(ClusterFile, table_hook(ClusterFile, converter))
    return converter


def table_hook(kind: type, converter: cattrs.Converter, **overrides: Any) -> Any:
    """What makes a `kind` of a table; `overrides` are cattrs', by field."""
    structure: Any = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **overrides)

    def hook(value: object, _: Any) -> Any:
        if not isinstance(value, dict):
            raise InputError(f"must be a table, not {_shown(value)}")
        return structure(value, kind)

    return hook


def _register_list(converter: cattrs.Converter, kind: Any, *, size: int | None) -> None:
    structure: Any = converter.get_structure_hook(kind)

    def hook(value: object, _: Any) -> Any:
        if size is not None and not (isinstance(value, list) and len(value) == size):
            raise InputError(
                f"must be a list of {size} host names (the same twice for a host's own local link), not {_shown(value)}"
            )
        if not isinstance(value, list):
            raise InputError("must be a list of tables: head each with double brackets")
        if not value:
            raise InputError("there is none")
        return structure(value, kind)

    converter.register_structure_hook_func(partial(operator.eq, kind), hook)


def problems_of(error: BaseException, *, path: str = "") -> Iterable[str]:
    """One line for every fault in cattrs' tree of exceptions, led by its path."""
    below = f"{path}." if path else ""
    if isinstance(error, cattrs.ClassValidationError):
        nested, own = error.group_exceptions()
        for inner, note in nested:
            yield from problems_of(inner, path=below + _key(note.name))
        for inner in own:
            yield from problems_of(inner, path=path)
    elif isinstance(error, cattrs.IterableValidationError):
        for inner, item in error.group_exceptions()[0]:
            yield from problems_of(inner, path=f"{path}[{item.index}]")
    elif isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [_key(known.name) for known in fields(error.cl)]
        for key in sorted(error.extra_fields):
            yield f"{below}{key}: unknown key{nearest(key, known)}"
    elif isinstance(error, KeyError):
        yield f"{path}: is missing"
    else:
        for problem in getattr(error, "problems", ()) or (error,):
            yield f"{path}: {problem}" if path else str(problem)


def _key(name: str) -> str:
    """How files call a field: without its unit, which they write with the value."""
    return re.sub(r"_(bytes_per_s|flop_per_s|s)$", "", name)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about `name`: the nearest of the `known`, or all of them."""
    listed = sorted(known)
    near = difflib.get_close_matches(name, listed, n=1, cutoff=0.4) if len(listed) <= _MOST_COMPARED else []
    return f"; did you mean {near[0]}?" if near else f"; known are {shortened(', '.join(listed))}"


def name_of(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > _LONGEST_NAME:
        raise InputError(f"must be a text of 1 to {_LONGEST_NAME} characters, not {_shown(value)}")
    return value


def _speed(value: object) -> float:
    if not isinstance(value, list):
        return _plain_speed(value)
    points = []
    for index, pair in enumerate(value):
        if not (isinstance(pair, list) and len(pair) == 2):
            raise InputError(f"must be a list of [size, speed], as ['10 Mflop', 0.5]; its item {index} is {_shown(pair)}")
        size, speed = pair
        try:
            points.append((parse_flop(size), _plain_speed(speed)))
        except InputError as error:
            raise InputError(f"item {index}: {error}") from None
    points.sort()
    if problem := points_problem(tuple(points)):
        raise InputError(problem)
    return SpeedTable(points)


def _plain_speed(value: object) -> float:
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise InputError(f"must be a number > 0, a text such as '10 Gflop/s', or a list of [size, speed], not {_shown(value)}")
    try:
        speed = parse_speed(value) if isinstance(value, str) else float(value)
    except OverflowError:  # an integer of more than 308 digits
        speed = math.inf
    if problem := speed_problem(speed):
        raise InputError(problem)
    return speed


def _spread(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise InputError(f"must be a number >= 0, relative to the speed, as 0.02, not {_shown(value)}")
    return float(value)


def count_of(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_PROCESSORS:
        raise InputError(f"must be a whole number from 1 to {MOST_PROCESSORS:,}, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return shortened(repr(value))


def positive(seen: object, value: _Number) -> _Number:
    if value <= 0:
        raise InputError(f"must be > 0, not {shortened(str(seen))}")
    return value
