"""The tables of a cluster's TOML file: their types, and the faults of single values, each with its path."""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, TypeVar

import cattrs
from cattrs.gen import make_dict_structure_fn, override

from tatami.cluster.cluster import MOST_PROCESSORS, Processor
from tatami.cluster.link import Link, OwnLink, link_problems
from tatami.cluster.speed_table import SpeedTable, points_problem, speed_problem
from tatami.errors import ClusterError, InputError, shortened
from tatami.units import has_unit, parse_bandwidth, parse_duration, parse_flop, parse_size, parse_speed

_LONGEST_NAME = 255
_MOST_COMPARED = 1000
_SIZES = re.compile(r"[1-9][0-9]{0,8}(-[1-9][0-9]{0,8}){2,999}")
"""Layer sizes of a network, as `tatami.workload.parse_net` reads them."""
_LEAST_MEMORY_BYTES = 1 << 20
_LEAST_BANDWIDTH_BYTES_PER_S = 1e4
"""Smaller numbers are those whose unit was forgotten."""
_MEMORY_UNITS = ("bytes", "GiB", "MiB")
_BANDWIDTH_UNITS = ("bytes/s", "Mbit/s", "Gbit/s")
_Number = TypeVar("_Number", int, float)
_Kind = TypeVar("_Kind")
Field = Any
"""How a field of a table is read; cattrs does not export the type of what `override` makes."""


@dataclass(frozen=True, kw_only=True)
class HostsLinkTable:
    hosts: list[str]
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if problems := link_problems(bandwidth_bytes_per_s=self.bandwidth, latency_s=self.latency):
            raise InputError("; ".join(problems.values()))

    def link(self) -> Link:
        return Link(bandwidth_bytes_per_s=self.bandwidth, latency_s=self.latency)


@dataclass(frozen=True, kw_only=True)
class OwnLinkTable:
    bandwidth: float | None = None
    latency: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessorTable:
    name: str
    speed: float
    spread: float | None = None
    message: float | None = None
    copy: float | None = None
    call: float | None = None
    step: float | None = None
    host: str | None = None
    link: OwnLink | None = None
    memory: int | None = None
    count: int | None = None

    @property
    def names(self) -> list[str]:
        return numbered(self.name, count=self.count, append=True)

    @property
    def hosts(self) -> list[str]:
        return self.names if self.host is None else numbered(self.host, count=self.count, append=False)

    def processors(self) -> tuple[Processor, ...]:
        return tuple(
            Processor(
                name=name,
                speed=self.speed,
                spread=self.spread,
                message_s=self.message or 0.0,
                copy_bytes_per_s=self.copy or math.inf,
                call_s=self.call or 0.0,
                step_s=self.step or 0.0,
                host=host,
                link=self.link,
                memory_bytes=self.memory,
            )
            for name, host in zip(self.names, self.hosts, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class NetworkTable:
    net: str
    sample: float


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    processors: tuple[ProcessorTable, ...]
    local: OwnLink | None = None
    network: OwnLink | None = None
    links: tuple[HostsLinkTable, ...] = ()
    networks: tuple[NetworkTable, ...] = ()


def structure(tables: Mapping[str, Any]) -> tuple[ClusterFile | None, list[str]]:
    """The file as typed tables, and no faults; or None, and one line for every fault of a value."""
    return structure_as(tables, ClusterFile)


def structure_as(table: Mapping[str, Any], kind: type[_Kind]) -> tuple[_Kind | None, list[str]]:
    """As `structure`, of one table of a `kind`."""
    try:
        return _converter().structure(table, kind), []
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
    name, latency, memory, bandwidth = read_by(name_of), read_by(parse_duration), read_by(memory_of), read_by(bandwidth_of)
    link = {"bandwidth": bandwidth, "latency": latency}
    processor = {"name": name, "host": name, "speed": read_by(_speed), "spread": read_by(_spread), "count": read_by(count_of)}
    converter.register_structure_hook(OwnLinkTable, table_hook(OwnLinkTable, converter, **link))
    processor |= {"link": read_by(partial(_own_link, converter=converter))}
    processor |= {"message": latency, "call": latency, "step": latency, "copy": bandwidth, "memory": memory}
    network = {"net": read_by(_net), "sample": read_by(parse_flop)}
    of_hosts = {**link, "hosts": read_by(_hosts)}
    kinds = ((HostsLinkTable, of_hosts), (ProcessorTable, processor), (NetworkTable, network))
    for table, of in kinds:
        converter.register_structure_hook(table, table_hook(table, converter, **of))
    several = {"processors": ProcessorTable, "links": HostsLinkTable, "networks": NetworkTable}
    lists = {key: list_hook(table, converter) for key, table in several.items()}
    usual = {key: read_by(lambda value: _as_link(converter.structure(value, OwnLinkTable))) for key in ("local", "network")}
    converter.register_structure_hook(ClusterFile, table_hook(ClusterFile, converter, **lists, **usual))
    return converter


def read_by(read: Callable[[Any], object], *, key: str | None = None) -> Field:
    """A field whose value `read` checks, and makes of what the file says under `key` (None: the field's name)."""
    return override(rename=key, struct_hook=lambda value, _: read(value))


def list_hook(kind: type, converter: cattrs.Converter) -> Field:
    """A field that is a list of tables, each a `kind`."""

    def read(value: object) -> Any:
        if not isinstance(value, list):
            raise InputError("must be a list of tables: head each with double brackets")
        if not value:
            raise InputError("there is none")
        return tuple(converter.structure(value, list[kind]))  # type: ignore[valid-type]

    return read_by(read)


def table_hook(kind: type, converter: cattrs.Converter, **fields_: Field) -> Any:
    """What makes a `kind` of a table."""
    structure: Any = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **fields_)

    def hook(value: object, _: Any) -> Any:
        if not isinstance(value, dict):
            raise InputError(f"must be a table, not {_shown(value)}")
        return structure(value, kind)

    return hook


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
    if any(unicodedata.category(character) == "Cc" for character in value):
        raise InputError(f"must have no control characters, such as a new line, but is {shortened(value)!r}")
    return value


def _net(value: object) -> str:
    if not (isinstance(value, str) and _SIZES.fullmatch(value)):
        raise InputError(f"must be the sizes of a network, such as 203-80-26, not {shortened(str(value))!r}")
    return value


def _own_link(value: object, *, converter: cattrs.Converter) -> OwnLink:
    return _as_link(
        converter.structure(value, OwnLinkTable) if isinstance(value, dict) else OwnLinkTable(bandwidth=bandwidth_of(value))
    )


def _as_link(table: OwnLinkTable) -> OwnLink:
    try:
        return OwnLink(bandwidth_bytes_per_s=table.bandwidth, latency_s=table.latency)
    except ClusterError as error:
        raise InputError(str(error)) from None


def _hosts(value: object) -> list[str]:
    if not (isinstance(value, list) and len(value) == 2):
        raise InputError(f"must be a list of 2 host names (the same twice for a host's own local link), not {_shown(value)}")
    return [name_of(each) for each in value]


def _speed(value: object) -> float:
    if not isinstance(value, list):
        return plain_speed(value)
    points = []
    for index, pair in enumerate(value):
        if not (isinstance(pair, list) and len(pair) == 2):
            raise InputError(f"must be a list of [size, speed], as ['10 Mflop', 0.5]; its item {index} is {_shown(pair)}")
        size, speed = pair
        try:
            points.append((parse_flop(size), plain_speed(speed)))
        except InputError as error:
            raise InputError(f"item {index}: {error}") from None
    points.sort()
    if problem := points_problem(tuple(points)):
        raise InputError(problem)
    return SpeedTable(points)


def plain_speed(value: object) -> float:
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


def bandwidth_of(value: object) -> float:
    """In bytes/s, as `parse_bandwidth` reads it; above 0, and no small number whose unit was forgotten."""
    return _with_unit(value, positive(value, parse_bandwidth), least=_LEAST_BANDWIDTH_BYTES_PER_S, units=_BANDWIDTH_UNITS)


def memory_of(value: object) -> int:
    """In bytes, as `bandwidth_of`."""
    return _with_unit(value, positive(value, parse_size), least=_LEAST_MEMORY_BYTES, units=_MEMORY_UNITS)


def positive(value: object, parse: Callable[[object], _Number]) -> _Number:
    """What `parse` makes of a quantity, which must be above 0."""
    is_negative = value.lstrip().startswith("-") if isinstance(value, str) else isinstance(value, int | float) and value < 0
    if is_negative or (found := parse(value)) <= 0:
        raise InputError(f"must be > 0, not {shortened(str(value))}")
    return found


def _with_unit(value: object, number: _Number, *, least: float, units: tuple[str, str, str]) -> _Number:
    if number < least and not has_unit(value):
        si, usual, other = units
        seen = shortened(str(value))
        raise InputError(f"{seen} without a unit is {seen} {si}: write '{seen} {usual}' or '{seen} {other}'")
    return number
