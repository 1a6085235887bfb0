"""The grid: which network on how many hosts with which links, and what of it was recorded already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paper.setting import CONDITIONS
from racing.networks import SIZES
from tatami.cluster import Cluster, Link, Processor

CONTESTANTS = ("tatami", "data-parallel", "ddp", "ddp-weighted", "ddp-weighted-float16", "fsdp", "pipelining")
BASE = "ddp-weighted"
"""What the others are compared with."""
SPEEDS: Mapping[int, tuple[float, ...]] = MappingProxyType({2: (1.0, 0.5), 4: (1.0, 1.0, 0.5, 0.5), 8: CONDITIONS["A"]})
BANDWIDTHS = (12.5e6, 125e6, 1.25e9)
FLOP_PER_S = 45e9
_LATENCY_S = 50e-6

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one lab measures.

    Attributes:
        network: one of `SIZES`.
        shape, samples: of it.
        speeds: of the hosts, relative.
        bandwidth_bytes_per_s: of all links.
        flop_per_s: of a host of speed 1; None: hosts have parts of a core.
        dilation: how many times as long all takes in the lab.
        rounds, repeats: blocks of each contestant, in turn, and iterations of a block.
    """

    network: str
    shape: dict[str, int]
    samples: int
    speeds: tuple[float, ...]
    bandwidth_bytes_per_s: float
    flop_per_s: float | None
    dilation: float
    rounds: int
    repeats: int

    @property
    def cluster(self) -> Cluster:
        """As the lab is asked for it."""
        unit = self.flop_per_s or 1.0
        processors = tuple(Processor(name=f"p{i}", speed=speed * unit, host=f"h{i}") for i, speed in enumerate(self.speeds))
        return Cluster(
            processors=processors, network=Link(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=_LATENCY_S)
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON, as it comes back from there."""
        return {**asdict(self), "speeds": list(self.speeds)}

    def is_of(self, record: Record) -> bool:
        """Whether a recorded line is of this cell, at the same parameters."""
        return all(record.get(name) == value for name, value in self.to_dict().items())


def cell_from_dict(values: Mapping[str, Any]) -> Cell:
    """What `Cell.to_dict` gave."""
    return Cell(**{**values, "speeds": tuple(values["speeds"])})


def grid_cell(network: str, num_hosts: int, bandwidth_bytes_per_s: float, *, rounds: int = 5) -> Cell:
    """A cell of the published grid."""
    sizes = SIZES[network]
    return Cell(
        network=network,
        shape=sizes.shape,
        samples=sizes.samples,
        speeds=SPEEDS[num_hosts],
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        flop_per_s=FLOP_PER_S,
        dilation=sizes.dilation[num_hosts],
        rounds=rounds,
        repeats=sizes.repeats,
    )


def read(file: Path) -> list[Record]:
    """All recorded lines."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def is_recorded(cell: Cell, records: Iterable[Record], contestants: Sequence[str]) -> bool:
    """Whether all of these contestants were measured, or could not be, in one run of this cell."""
    runs: dict[str, set[str]] = {}
    for record in records:
        if cell.is_of(record):
            runs.setdefault(record["began"], set()).add(record["contestant"])
    return any(set(contestants) <= names for names in runs.values())
