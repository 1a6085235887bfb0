"""What is compared on one platform: algorithms, grids and sizes, each a case with a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from tatami.collective import Grid, Sync, build
from tatami.errors import InputError
from tatami.sim.allreduce.allreduce_job import AllReduceJob
from tatami.sim.allreduce.software import Software
from tatami.sim.platforms import AbstractPlatform, ClusterPlatform

GRIDDED = ("torus", "torus_native", "torus_put", "torus_accumulate")
"""Algorithms that lie in a grid."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One all-reduce among those that are compared.

    Attributes:
        algorithm: a name in `tatami.collective.ALGORITHMS`.
        ranks: P, one on each host, from host 0 on.
        size_bytes: of each rank's vector.
        grid: (M, N) of those algorithms that have one; None: as the library chooses.
        across: the all-reduce down the columns.
        sync: what synchronises puts.
        native: what native collectives are expanded to.
        software: what ranks add to the wires.
        element_bytes: 4 for float32.

    Raises:
        InputError: a size that is not a whole number of elements.
    """

    algorithm: str
    ranks: int
    size_bytes: int
    grid: Grid | None = None
    across: str = "ring"
    sync: Sync = Sync.PSCW
    native: str = "mpich"
    software: Software = field(default_factory=Software)
    element_bytes: int = 4

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or self.size_bytes % self.element_bytes:
            raise InputError(
                f"an all-reduce is of a whole number of elements of {self.element_bytes} bytes, not of {self.size_bytes} bytes"
            )

    def job(self, platform: AbstractPlatform) -> AllReduceJob:
        """What `replay` runs. Raises as `tatami.collective.build` and `AllReduceJob`."""
        schedule = build(
            self.algorithm,
            ranks=self.ranks,
            size=self.size_bytes // self.element_bytes,
            hosts=hosts_of(platform, ranks=self.ranks),
            grid=self.grid if self.algorithm in GRIDDED else None,
            across=self.across,
            sync=self.sync,
        )
        return AllReduceJob(
            platform=platform, schedule=schedule, element_bytes=self.element_bytes, native=self.native, software=self.software
        )


def grids_of(ranks: int) -> tuple[Grid, ...]:
    """(2, P/2) to (P/2, 2), by M; empty where P is prime."""
    return tuple((m, ranks // m) for m in range(2, ranks // 2 + 1) if ranks % m == 0)


def hosts_of(platform: AbstractPlatform, *, ranks: int) -> tuple[str, ...] | None:
    """The machine of each rank, as schedules want to know it; None where the platform has fewer hosts than ranks."""
    if len(platform.hosts) < ranks:
        return None
    if isinstance(platform, ClusterPlatform):
        return tuple(processor.host for processor in platform.cluster.processors[:ranks])
    return tuple(platform.hosts[:ranks])
