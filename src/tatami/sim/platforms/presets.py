"""Platforms of published systems, by name."""

from __future__ import annotations

from collections.abc import Callable

from tatami.errors import InputError
from tatami.sim.platforms.base import AbstractPlatform, Wire
from tatami.sim.platforms.fat_tree import FatTree
from tatami.sim.platforms.tree import MachineGroup, Tree

_OAKFOREST_NODES = 256
_OAKFOREST_LATENCY_S = 250e-9
"""Latency of one cable: four of them make the microsecond or so that small messages take between two nodes."""


def preset(name: str, *, nodes: int | None = None, latency_s: float | None = None) -> AbstractPlatform:
    """A platform by name.

    Args:
        name: "paper-server-10k": the parameter-server system of Li, Tanimura and Nakada. "oakforest-like": a fat tree with full
            bisection and 12.5 GB/s, as Oakforest-PACS has, of 256 nodes (it has 8,208).
        nodes: another number of nodes; of workers, for "paper-server-10k", in clusters of 100.
        latency_s: of one cable, for "oakforest-like".

    Raises:
        InputError: there is no such preset (the message lists them), or it has no such parameter.
    """
    if name not in PRESETS:
        raise InputError(f"there is no preset {name!r}; there are: {', '.join(sorted(PRESETS))}")
    return PRESETS[name](nodes, latency_s)


def _paper_server(nodes: int | None, latency_s: float | None) -> AbstractPlatform:
    """Table of the paper: clusters of 100 nodes on 1 Gbit/s behind 5 GB/s, 100 servers on 5 GB/s, 0.5 TB/s between all."""
    if latency_s is not None:
        raise InputError("the latencies of paper-server-10k are those of the paper; describe another network in a file")
    num_workers = 10_000 if nodes is None else nodes
    if num_workers < 100 or num_workers % 100:
        raise InputError(
            f"paper-server-10k has its workers in clusters of 100: nodes must be a multiple of it, not {num_workers}"
        )
    line = Wire(bandwidth_bytes_per_s=0.5e12, latency_s=500e-6)
    worker = MachineGroup(name="worker{i}", count=100, link=Wire(bandwidth_bytes_per_s=125e6, latency_s=50e-6))
    server = MachineGroup(name="server{i}", count=100, link=Wire(bandwidth_bytes_per_s=5e9, latency_s=500e-6))
    backbone = Wire(bandwidth_bytes_per_s=5e9, latency_s=500e-6)
    clusters = MachineGroup(name="cluster{i}", count=num_workers // 100, backbone=backbone, groups=(worker,))
    return Tree(
        name="paper-server-10k", backbone=line, groups=(clusters, MachineGroup(name="servers", backbone=line, groups=(server,)))
    )


def _oakforest(nodes: int | None, latency_s: float | None) -> AbstractPlatform:
    latency_s = _OAKFOREST_LATENCY_S if latency_s is None else latency_s
    link = Wire(bandwidth_bytes_per_s=12.5e9, latency_s=latency_s, duplex=True)
    return FatTree(name="oakforest-like", nodes=_OAKFOREST_NODES if nodes is None else nodes, link=link)


PRESETS: dict[str, Callable[[int | None, float | None], AbstractPlatform]] = {
    "paper-server-10k": _paper_server,
    "oakforest-like": _oakforest,
}
"""What builds them, from `nodes` and `latency_s`, each None where it was not given."""
