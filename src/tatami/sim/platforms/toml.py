"""Platforms as files: a cluster.toml (processors and links), or groups with backbones.

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

from functools import cache
from pathlib import Path
from typing import Any

import cattrs

from tatami.cluster.tables import bandwidth_of, count_of, list_hook, name_of, positive, problems_of, read_by, table_hook
from tatami.cluster.toml import cluster_of
from tatami.errors import ClusterError, InputError, shortened
from tatami.inputs import read_toml
from tatami.sim.platforms.base import RDMA, TCP, AbstractPlatform, Fabric, Wire
from tatami.sim.platforms.flat import ClusterPlatform
from tatami.sim.platforms.tree import MachineGroup, Tree
from tatami.units import parse_duration, parse_speed

_FABRICS = {"tcp": TCP, "rdma": RDMA}
_DEEPEST = 20


def read_platform(path: Path | str) -> AbstractPlatform:
    """The platform that a file describes: TOML with `groups` or with `processors`.

    Raises:
        ClusterError: it cannot be read, or describes no platform: every fault, each with its path, as in
            "groups[0].groups[1].speed: must be > 0, not -1".
    """
    file = Path(path)
    tables = read_toml(file, what="the platform file", error=ClusterError)
    if "groups" not in tables:
        return ClusterPlatform(cluster=cluster_of(tables, source=path), name=file.stem)
    try:
        # Before anything descends into them.
        level: list[Any] = [tables]
        for _ in range(_DEEPEST + 1):
            inner = [table.get("groups") for table in level if isinstance(table, dict)]
            level = [table for each in inner if isinstance(each, list) for table in each]
        if level:
            raise InputError(f"groups are nested more than {_DEEPEST} deep")
        tree: Tree = _converter().structure({"name": file.stem, **tables}, Tree)
    except (cattrs.BaseValidationError, InputError) as error:
        raise ClusterError(f"{path} cannot be used as a platform:", problems=list(problems_of(error))) from None
    return tree


@cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)

    name, count, flag = (read_by(read) for read in (name_of, count_of, _flag))
    bandwidth, latency = read_by(bandwidth_of, key="bandwidth"), read_by(parse_duration, key="latency")
    wire = table_hook(Wire, converter, bandwidth_bytes_per_s=bandwidth, latency_s=latency, duplex=flag, fat=flag)
    converter.register_structure_hook(Wire, wire)
    link = read_by(lambda value: converter.structure(value, Wire))
    speed = read_by(lambda value: positive(value, parse_speed), key="speed")
    parts = {"name": name, "backbone": link, "groups": list_hook(MachineGroup, converter)}
    machine = {"speed_flop_per_s": speed, "cores": count, "count": count, "link": link}
    machines = table_hook(MachineGroup, converter, **machine, **parts)

    def group(value: object, kind: Any) -> MachineGroup:
        if isinstance(value, dict) and "groups" in value and ("speed" in value or "cores" in value):
            raise InputError("speed and cores are of machines; this holds groups")
        made: MachineGroup = machines(value, kind)
        return made

    converter.register_structure_hook(MachineGroup, group)
    converter.register_structure_hook(Tree, table_hook(Tree, converter, fabric=read_by(_fabric), **parts))
    return converter


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"must be true or false, not {shortened(repr(value))}")
    return value


def _fabric(value: object) -> Fabric:
    if not isinstance(value, str) or value not in _FABRICS:
        raise InputError(f"must be one of {', '.join(_FABRICS)}, not {shortened(repr(value))}")
    return _FABRICS[value]
