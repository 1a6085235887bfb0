"""What the simulator is held against: a test bed, and the tilings and all-reduces that are measured and simulated on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

from tatami.cluster import Cluster, Link, Processor
from tatami.tiling import Layout, Replica

SPEEDS = (1.0, 0.8, 0.6, 0.5)
NET, SAMPLES = "203-800-26", 32768
"""Some 0.3 s of compute in an iteration: quotas are kept by the 10 ms (docs/lab.md)."""
SIZES_BYTES = (4 * 1024, 64 * 1024, 512 * 1024, 2 * 1024**2, 8 * 1024**2)
ALGORITHMS = ("ring", "halving_doubling", "torus")
_LATENCY_S = 50e-6


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What the ranks of one lab measure.

    Attributes:
        speeds: of the hosts, relative; one rank on each.
        bandwidth_bytes_per_s: of all links.
        net, samples: what is trained, in every tiling.
        rounds, repeats: blocks of each tiling, and of each tile alone, in turn; and iterations of a block.
        sizes_bytes, algorithms: of the all-reduces.
    """

    bandwidth_bytes_per_s: float
    speeds: tuple[float, ...] = SPEEDS
    net: str = NET
    samples: int = SAMPLES
    rounds: int = 6
    repeats: int = 2
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    algorithms: tuple[str, ...] = ALGORITHMS

    @property
    def cluster(self) -> Cluster:
        """As the lab is asked for it."""
        return Cluster(
            processors=tuple(Processor(name=f"p{i}", speed=speed, host=f"h{i}") for i, speed in enumerate(self.speeds)),
            network=Link(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=_LATENCY_S),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `job_from_dict` reads it back."""
        return asdict(self)


def job_from_dict(values: Mapping[str, Any]) -> RankJob:
    """What `RankJob.to_dict` wrote."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return RankJob(**given)


def tilings(cluster: Cluster) -> dict[str, Layout]:
    """By name: every way to cut the processors, slowest first, into replicas, in proportion to speeds; and equal grids.

    "3+1" has three processors in its first replica and one in its second; "even 2x2" equal tiles.
    """
    slowest_first = sorted(cluster.processors, key=lambda processor: processor.speed)
    names = [processor.name for processor in slowest_first]
    speeds = {processor.name: processor.speed for processor in slowest_first}
    found = {"+".join(map(str, sizes)): _replicas(names, sizes, weights=speeds) for sizes in _compositions(len(names))}
    equal = dict.fromkeys(names, 1.0)
    for replicas in range(1, len(names) + 1):
        if len(names) % replicas == 0:
            rows = len(names) // replicas
            found[f"even {replicas}x{rows}"] = _replicas(names, (rows,) * replicas, weights=equal)
    return found


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    """(4), (1, 3), (2, 2), ...: every order of every sum."""
    if total == 0:
        yield ()
    for first in range(total, 0, -1):
        yield from ((first, *rest) for rest in _compositions(total - first))


def _replicas(names: Sequence[str], sizes: Sequence[int], *, weights: Mapping[str, float]) -> Layout:
    """Replicas of so many processors each, in their order; areas in proportion to `weights`."""
    total = fsum(weights[name] for name in names)
    replicas, begin = [], 0
    for size in sizes:
        members = tuple(names[begin : begin + size])
        width = fsum(weights[name] for name in members)
        heights = tuple(weights[name] / width for name in members)
        replicas.append(Replica(width=width / total, processors=members, heights=heights))
        begin += size
    return Layout(replicas=tuple(replicas))
