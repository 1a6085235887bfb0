"""What if: a cluster with another link or speed, with more machines, or without some."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tatami.cluster.cluster import Cluster, Processor
from tatami.cluster.link import OwnLink
from tatami.cluster.speed_table import fastest, missing_units
from tatami.cluster.tables import ProcessorTable, bandwidth_of, memory_of, nearest, plain_speed, structure_as
from tatami.errors import ClusterError, InputError, shortened, warn
from tatami.units import parse_duration

PATHS = ("network.bandwidth", "network.latency", "processors.NAME.speed", "processors.NAME.memory", "processors.NAME.link")
"""What `changed` can change."""
_NEW = "new"
"""What a machine is called that is added without a name."""
_MEASURED = {"message": "message_s", "copy": "copy_bytes_per_s", "call": "call_s", "step": "step_s", "spread": "spread"}
"""What a probe measures of a processor, apart from its speed: key in a file, and field."""


def changed(cluster: Cluster, path: str, value: str) -> Cluster:
    """The cluster with `value` at `path`, one of `PATHS`; NAME is that of a processor or of its host.

    Raises:
        InputError: no such path or processor, a value that does not fit (says what there is), or nothing that it changes.
    """
    first, _, rest = path.partition(".")
    if len(set(cluster.host_of.values())) == 1 and path.endswith((".bandwidth", ".latency", ".link")):
        raise InputError(f"{path} changes nothing: all ranks are on {cluster.processors[0].host!r}; give some another host")
    if first == "network" and rest in ("bandwidth", "latency"):
        read: Callable[[Any], float] = bandwidth_of if rest == "bandwidth" else parse_duration
        number = _read(path, value, read)
        field = "bandwidth_bytes_per_s" if rest == "bandwidth" else "latency_s"
        network = _checked(path, lambda: replace(cluster.network, **{field: number}))
        links = cluster.links
        if not _is_probed(cluster):
            _check_used(cluster, path, field)
        else:
            links = {
                (one, other): link if one == other else replace(link, **{field: number}) for (one, other), link in links.items()
            }
        return replace(cluster, network=network, links=links)
    name, _, key = rest.rpartition(".")
    if first != "processors" or key not in ("speed", "memory", "link"):
        raise InputError(f"{path}: there is nothing of this name to vary; choose one of {', '.join(PATHS)}, samples")
    names = named(cluster, [name])
    if key == "speed":
        speed = _read(path, value, plain_speed)
        change: dict[str, Any] = {"speed": speed}
        for problem in missing_units([speed, *(each.speed for each in cluster.processors if each.name not in names)]).values():
            raise InputError(f"{path}: {problem}")
    elif key == "memory":
        change = {"memory_bytes": _read(path, value, memory_of)}
    else:
        bandwidth = _read(path, value, bandwidth_of)
        change = {"link": _checked(path, lambda: OwnLink(bandwidth_bytes_per_s=bandwidth))}
        # A link is its host's, so that all its processors have it; links of pairs that were measured would hide it.
        hosts = {cluster.host_of[name] for name in names}
        names = {each.name for each in cluster.processors if each.host in hosts}
        links = {pair: link for pair, link in cluster.links.items() if pair[0] == pair[1] or hosts.isdisjoint(pair)}
        cluster = replace(cluster, links=links)
    return replace(
        cluster, processors=tuple(replace(each, **change) if each.name in names else each for each in cluster.processors)
    )


def _check_used(cluster: Cluster, path: str, field: str) -> None:
    """Refuse to vary a network that no pair of hosts uses; warn of the pairs and hosts that do not use it."""
    own = {each.host for each in cluster.processors if each.link and getattr(each.link, field) is not None}
    rest = set(cluster.host_of.values()) - own
    pairs = [pair for pair in cluster.links if pair[0] != pair[1]]
    kept = [f"the links of hosts that have their own ({shortened(', '.join(sorted(own)))})"] * bool(own)
    kept += [f"the links in [[links]] ({shortened(', '.join(map(' - '.join, pairs)))})"] * bool(pairs)
    if len(rest) * (len(rest) - 1) // 2 + len(rest) * len(own) == sum(not rest.isdisjoint(pair) for pair in pairs):
        raise InputError(f"{path} changes nothing: {' and '.join(kept)} take precedence. Vary processors.NAME.link")
    if kept:
        warn(f"{path} does not change {' and '.join(kept)}, which take precedence")


def _is_probed(cluster: Cluster) -> bool:
    """Whether every pair of hosts has a link of its own, as a probe writes them: then those are the network."""
    hosts = len(set(cluster.host_of.values()))
    return sum(one != other for one, other in cluster.links) == hosts * (hosts - 1) // 2


def named(cluster: Cluster, names: Iterable[str]) -> set[str]:
    """The processors of these names, or on the hosts of these names.

    Raises:
        InputError: there is none; says the nearest, or all that there are.
    """
    found: set[str] = set()
    for name in names:
        own = {each.name for each in cluster.processors if name in (each.name, each.host)}
        if not own:
            known = {*cluster.by_name, *cluster.host_of.values()}
            raise InputError(f"no processor or host is called {shortened(name)!r}{nearest(name, known)}")
        found |= own
    return found


def without(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """The cluster without processors of these names, or on hosts of these names.

    Raises:
        InputError: there is none, or no other one.
    """
    gone = named(cluster, names)
    rest = tuple(each for each in cluster.processors if each.name not in gone)
    if not rest:
        raise InputError(f"without {', '.join(names)} no machine is left")
    return replace(cluster, processors=rest)


def with_more(cluster: Cluster, text: str) -> Cluster:
    """The cluster with one machine more, or `count` of them, as "speed=15e12,memory=24GiB,link=1Gbit/s,count=2" describes it.

    The keys are those of `[[processors]]` in a cluster's file; a name is not needed. What is not given of its costs (of
    messages, copies, calls and steps, and the spread of its speed) is that of the processor nearest in speed (`nearest_to`).

    Raises:
        InputError: unknown keys, values that do not fit, or names that are taken, each with its key.
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if problems := [f"{key.strip()!r} needs a value: write key=value" for key, equals, _ in pairs if not equals]:
        raise ClusterError(f"{text!r} does not describe a machine:", problems=problems)
    table: dict[str, Any] = {key.strip(): value.strip() for key, _, value in pairs}
    for key, kind in (("count", int), ("spread", float)):
        if key in table:
            table[key] = _number(table[key], kind)
    taken = {*cluster.by_name, *cluster.host_of.values()}
    table.setdefault("name", next(each for each in _names() if each not in taken and f"{each}0" not in taken))
    read, problems = structure_as(table, ProcessorTable)
    if read is None:
        raise ClusterError(f"{text!r} does not describe a machine:", problems=problems)
    more: tuple[Processor, ...] = read.processors()
    clashes = [f"speed: {problem}" for problem in missing_units([more[0].speed, *cluster.speeds.values()]).values()][:1]
    if clashes := [*clashes, *(f"name: {each.name!r} is taken already" for each in more if each.name in cluster.by_name)]:
        raise ClusterError(f"{text!r} does not describe a new machine:", problems=clashes)
    near = nearest_to(cluster, more[0].speed)
    costs: dict[str, Any] = {field: getattr(near, field) for key, field in _MEASURED.items() if key not in table}
    return replace(cluster, processors=(*cluster.processors, *(replace(each, **costs) for each in more)))


def nearest_to(cluster: Cluster, speed: float) -> Processor:
    """The processor of which the speed is nearest to `speed`, as a ratio."""
    return min(cluster.processors, key=lambda each: abs(math.log(fastest(each.speed) / fastest(speed))))


def _names() -> Iterable[str]:
    yield _NEW
    number = 1
    while True:
        number += 1
        yield f"{_NEW}{number}-"


def _number(text: str, kind: type[int] | type[float]) -> object:
    """A number where it is one; what is none is refused as it is."""
    try:
        return kind(text)
    except ValueError:
        return text


def _read(path: str, value: str, read: Callable[[Any], Any]) -> Any:
    try:
        return read(value)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _checked(path: str, make: Callable[[], Any]) -> Any:
    """What `make` makes of a value, whose error is led by the path."""
    return _read(path, "", lambda _: make())
