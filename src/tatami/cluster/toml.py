"""A cluster as a TOML file, as a person writes it and as `tatami probe` does.

[local]                                   # between processors of one host; may be left out
bandwidth = "40 Gbit/s"                   # text with a unit, or a number in bytes/s, from 10,000
latency = "5 us"                          # ... or in seconds

[network]                                 # between hosts; may be left out, and is then 1 Gbit/s and 50 us, as is what it
bandwidth = "1 Gbit/s"                    # does not say
latency = "50 us"

[[processors]]
name = "old{i}"                           # with count: old0 ... old3
speed = 1.0                               # relative, or "10 Gflop/s", or by the size of the tile, in flop of an iteration:
                                          # [["10 Mflop", 0.5], ["1 Gflop", 1.0]]; a larger tile must not take less time
spread = 0.02                             # of the measured speed, relative; may be left out
message = "30 us"                         # what a message costs it, sent or received; may be left out
copy = "20 Gbit/s"                        # at which it copies into messages and out of them; may be left out
call = "0.4 ms"                           # what a block of a network costs it, however small its tile is; may be left out
step = "2 ms"                             # the same of an iteration, however few blocks it has; may be left out
host = "cpu{i}"                           # cpu0 ... cpu3; left out, each processor is a host of its own, with its own name
link = "50 Mbit/s"                        # its host's own link to all others, or { bandwidth = "50 Mbit/s", latency = "5 ms" };
                                          # between two hosts the slower one counts; may be left out, and is then the network
memory = "24 GiB"                         # or a number in bytes, from 1 MiB; may be left out
count = 4                                 # may be left out

[[links]]                                 # an exception for two hosts, or for one: its own local link
hosts = ["cpu0", "cpu1"]
bandwidth = "10 Gbit/s"
latency = "20 us"

[[networks]]                              # what `tatami probe --net` has timed; may be left out
net = "203-80-26"
sample = "37 kflop"                       # what a sample costs a processor, however few units it has
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tatami.cluster.cluster import MOST_PROCESSORS, Cluster
from tatami.cluster.link import LOCAL_LINK, NETWORK_LINK, Link, OwnLink
from tatami.cluster.speed_table import SpeedTable, missing_units
from tatami.cluster.tables import ClusterFile, nearest, numbered, structure
from tatami.errors import MOST_PROBLEMS, ClusterError, shortened, warn
from tatami.inputs import read_toml
from tatami.outputs import write_text
from tatami.units import format_bandwidth, format_duration, format_flop, format_size


def read_cluster(path: Path | str) -> Cluster:
    """The cluster that a TOML file describes.

    Raises:
        ClusterError: the file cannot be read, or is not TOML, or does not describe a cluster: `problems` holds every fault,
            each with its path, such as `processors[2].speed: must be > 0, not -1`.
    """
    return cluster_of(read_toml(path, what="the cluster file", error=ClusterError), source=path)


def cluster_of(tables: Mapping[str, Any], *, source: Path | str) -> Cluster:
    """The cluster that the tables of the file `source` describe. Raises as `read_cluster`."""
    file, problems = structure(tables)
    num_processors = sum(table.count or 1 for table in file.processors) if file is not None else 0
    if num_processors > MOST_PROCESSORS:
        problems.append(f"processors: {num_processors:,} are too many; at most {MOST_PROCESSORS:,}")
    else:
        problems += _clashes(tables) + (_link_clashes(file) if file is not None else [])
    if file is not None:
        forgotten = missing_units([table.speed for table in file.processors])
        problems += [f"processors[{index}].speed: {problem}" for index, problem in forgotten.items()]
    if problems or file is None:
        raise ClusterError(f"{source} cannot be used as a cluster:", problems=problems)
    _warn_assumed(file, source=source)
    return Cluster(
        processors=tuple(processor for table in file.processors for processor in table.processors()),
        local=file.local.over(LOCAL_LINK) if file.local else LOCAL_LINK,
        network=file.network.over(NETWORK_LINK) if file.network else NETWORK_LINK,
        links={_pair(table.hosts): table.link() for table in file.links},
        sample_flop={table.net: table.sample for table in file.networks},
    )


def write_cluster(cluster: Cluster, path: Path | str, *, force: bool = False) -> None:
    """Write a TOML file that `read_cluster` reads as an equal cluster. Links of hosts that have no processor are left out.

    Raises:
        OutputExistsError: the file exists and `force` was not given.
    """
    write_text(path, cluster_toml(cluster), force=force)


def cluster_toml(cluster: Cluster) -> str:
    """The text of the file that `write_cluster` writes."""
    hosts = {processor.host for processor in cluster.processors}
    blocks = [["[local]", *_link_lines(cluster.local)], ["[network]", *_link_lines(cluster.network)]]
    for pair, link in cluster.links.items():
        if hosts.issuperset(pair):
            blocks.append(["[[links]]", f"hosts = [{', '.join(map(_text, pair))}]", *_link_lines(link)])
    for net, flop in cluster.sample_flop.items():
        blocks.append(["[[networks]]", f"net = {_text(net)}", f"sample = {_text(format_flop(flop))}"])
    for processor in cluster.processors:
        lines = ["[[processors]]", f"name = {_text(processor.name)}", f"speed = {_speed_text(processor.speed)}"]
        if processor.spread is not None:
            lines.append(f"spread = {processor.spread!r}")
        if processor.message_s:
            lines.append(f"message = {_text(format_duration(processor.message_s))}")
        if processor.copy_bytes_per_s < math.inf:
            lines.append(f"copy = {_text(format_bandwidth(processor.copy_bytes_per_s))}")
        if processor.call_s:
            lines.append(f"call = {_text(format_duration(processor.call_s))}")
        if processor.step_s:
            lines.append(f"step = {_text(format_duration(processor.step_s))}")
        lines.append(f"host = {_text(processor.host)}")
        if processor.link is not None:
            lines.append(f"link = {_own_link_text(processor.link)}")
        if processor.memory_bytes is not None:
            lines.append(f"memory = {_text(format_size(processor.memory_bytes))}")
        blocks.append(lines)
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _speed_text(speed: float) -> str:
    return repr([list(point) for point in speed.points] if isinstance(speed, SpeedTable) else speed)


def _own_link_text(link: OwnLink) -> str:
    bandwidth = "" if link.bandwidth_bytes_per_s is None else _text(format_bandwidth(link.bandwidth_bytes_per_s))
    if link.latency_s is None:
        return bandwidth
    latency = f"latency = {_text(format_duration(link.latency_s))}"
    return f"{{ bandwidth = {bandwidth}, {latency} }}" if bandwidth else f"{{ {latency} }}"


def _link_lines(link: Link) -> list[str]:
    return [
        f"bandwidth = {_text(format_bandwidth(link.bandwidth_bytes_per_s))}",
        f"latency = {_text(format_duration(link.latency_s))}",
    ]


def _text(text: str) -> str:
    """A TOML string: JSON's, except for the delete character, which JSON leaves as it is and TOML forbids."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _pair(hosts: Iterable[str]) -> tuple[str, str]:
    first, second = sorted(hosts)
    return first, second


def _clashes(tables: Mapping[str, Any]) -> list[str]:
    """Names that are taken and hosts that are not there: looked for in what is well formed, beside other faults."""
    # This runs also where the tables have other faults, so that a file's problems are all told at once. Therefore nothing here
    # is sure to have its type, and a count that is out of range is passed over: a million names would take long to compare.
    problems = []
    taken: dict[str, int] = {}
    hosts: set[str] = set()
    room = MOST_PROCESSORS
    for index, table in enumerate(_listed(tables.get("processors"))):
        count, host = table.get("count"), table.get("host")
        count = count if isinstance(count, int) and 0 < count <= room and not isinstance(count, bool) else None
        room -= count or 0
        if isinstance(host, str):
            hosts.update(numbered(host, count=count, append=False))
        if isinstance(name := table.get("name"), str):
            unfolded = numbered(name, count=count, append=True)
            hosts.update(unfolded if host is None else ())
            for each in unfolded:
                if each in taken:
                    problems.append(
                        f"processors[{index}].name: {shortened(each)!r} is taken already, by processors[{taken[each]}]"
                    )
                taken.setdefault(each, index)
    nets: set[str] = set()
    for index, table in enumerate(_listed(tables.get("networks"))):
        if isinstance(net := table.get("net"), str):
            if net in nets:
                problems.append(f"networks[{index}].net: {shortened(net)!r} is there already")
            nets.add(net)
    pairs: dict[tuple[str, str], int] = {}
    for index, table in enumerate(_listed(tables.get("links"))):
        names = table.get("hosts")
        if not (isinstance(names, list) and len(names) == 2 and all(isinstance(name, str) for name in names)):
            continue
        for position, name in enumerate(names):
            if name not in hosts:
                near = nearest(name, hosts) if len(problems) < MOST_PROBLEMS else ""  # more are not shown
                problems.append(f"links[{index}].hosts[{position}]: no processor is on {shortened(name)!r}{near}")
        if _pair(names) in pairs:
            problems.append(f"links[{index}].hosts: this pair is taken already, by links[{pairs[_pair(names)]}]")
        pairs.setdefault(_pair(names), index)
    return problems


def _link_clashes(file: ClusterFile) -> list[str]:
    """Processors of one host that are given different links to other hosts."""
    problems = []
    given: dict[str, tuple[OwnLink, int]] = {}
    for index, table in enumerate(file.processors):
        if table.link is None:
            continue
        for host in dict.fromkeys(table.hosts):
            link, first = given.setdefault(host, (table.link, index))
            if link != table.link:
                problems.append(f"processors[{index}].link: {shortened(host)!r} has another link, by processors[{first}]")
    return problems


def _warn_assumed(file: ClusterFile, *, source: Path | str) -> None:
    """Files of before, in which all processors without a host were on one, are read otherwise now."""
    apart = [name for table in file.processors if table.host is None for name in table.names]
    if len(apart) > 1 and not (file.network or file.links or any(table.link for table in file.processors)):
        warn(
            f"{source} says neither on which host nor over which network {shortened(', '.join(apart))} are: each is taken for "
            f"a host of its own, on {format_bandwidth(NETWORK_LINK.bandwidth_bytes_per_s)} and "
            f"{format_duration(NETWORK_LINK.latency_s)}. Give [network], or the same host to processors of one machine"
        )


def _listed(value: object) -> list[dict[str, Any]]:
    """The tables of a list, an empty one in place of what is none, so that indices stay right."""
    return [item if isinstance(item, dict) else {} for item in value] if isinstance(value, list) else []
