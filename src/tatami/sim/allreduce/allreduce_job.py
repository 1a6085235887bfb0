"""One all-reduce on one platform, as a run of its own, and the cases that are compared: algorithms, grids and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tatami.collective import Grid, Schedule, Sync, build
from tatami.errors import InputError, ScheduleError
from tatami.sim.allreduce.natives import expand, find_native
from tatami.sim.allreduce.replay import Replay
from tatami.sim.allreduce.software import Software
from tatami.sim.platforms import AbstractPlatform, ClusterPlatform
from tatami.sim.stage import Stage, play


@dataclass(frozen=True, kw_only=True)
class AllReduceJob:
    """What `replay` runs: rank r on host r.

    Attributes:
        platform: at least as many hosts as the schedule has ranks.
        schedule: any.
        element_bytes: 4 for float32.
        native: what native phases are expanded to, a name in `NATIVES`.
        software: what ranks add to the wires.
        skip: whether rounds that repeat themselves are left out.

    Raises:
        ScheduleError: fewer hosts than ranks.
        InputError: an unknown `native`.
    """

    platform: AbstractPlatform
    schedule: Schedule
    element_bytes: int = 4
    native: str = "mpich"
    software: Software = field(default_factory=Software)
    skip: bool = True

    def __post_init__(self) -> None:
        find_native(self.native)
        if len(self.platform.hosts) < self.schedule.ranks:
            raise ScheduleError(
                f"{self.schedule.algorithm} is for {self.schedule.ranks} ranks, but {self.platform.name} has "
                f"{len(self.platform.hosts)} hosts; take fewer ranks, or a platform with more nodes"
            )


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The result of a simulated all-reduce.

    Attributes:
        algorithm: the schedule's.
        total_s: from the start, which all ranks make together, until the last has everything.
        phases: title, and when the last rank left it.
        bytes_moved: of vectors, by all ranks together; empty messages are not counted.
    """

    algorithm: str
    total_s: float
    phases: tuple[tuple[str, float], ...]
    bytes_moved: float


def replay(job: AllReduceJob) -> Replayed:
    """Simulate an all-reduce.

    Raises:
        ScheduleError: the schedule never ends: some rank waits for a message that is never sent (`verify` says more).
    """
    schedule = expand(job.schedule, rule=find_native(job.native), element_bytes=job.element_bytes)

    def act(stage: Stage) -> Callable[[], Replayed]:
        ends: dict[int, float] = {}

        def done(rank: int) -> None:
            ends[rank] = run.now_s

        run = Replay(
            stage,
            schedule,
            hosts=range(schedule.ranks),
            element_bytes=job.element_bytes,
            software=job.software,
            done=done,
            skip=job.skip,
        )

        def finish() -> Replayed:
            if missing := sorted(set(range(schedule.ranks)) - set(ends)):
                raise ScheduleError(
                    f"{schedule.algorithm}: rank {missing[0]} and {len(missing) - 1} others never ended: they wait for what "
                    "no rank sends; tatami.collective.verify says where the schedule is wrong"
                )
            return Replayed(
                algorithm=schedule.algorithm,
                total_s=max(ends.values()),
                phases=tuple((phase.title, end_s) for phase, end_s in zip(schedule.phases, run.phase_ends_s, strict=True)),
                bytes_moved=run.payload_bytes,
            )

        for rank in range(schedule.ranks):
            run.enter(rank)
        return finish

    return play(job.platform, act)


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
