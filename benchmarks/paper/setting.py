"""The paper's evaluation as facts: its test bed, the methods it compares, and the settings that its figures vary.

Ozawa, Sugaya and Aso: NETtalk on N = 4..8 processors of relative speeds, under condition A (strongly unequal) and B (weakly).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import fsum
from types import MappingProxyType
from typing import Any, Literal, final

from tatami.cluster import Cluster, Link, Processor
from tatami.errors import InputError
from tatami.retiling import Retiler
from tatami.tiling import (
    DEFAULT_PLANNER,
    AbstractCost,
    AbstractPlanner,
    Cost,
    EvenPlanner,
    GridPlanner,
    GridRevPlanner,
    Layout,
    find_planner,
    plan,
)
from tatami.workload import Workload

Condition = Literal["A", "B"]
CONDITIONS: Mapping[Condition, tuple[float, ...]] = MappingProxyType(
    {
        "A": (0.25, 0.31, 0.63, 1.0, 1.0, 0.42, 0.67, 0.63),
        "B": (0.63, 0.63, 0.63, 1.0, 0.63, 1.0, 1.0, 0.63),
    }
)
"""Relative speeds of the paper's processors; a test bed of N takes the first N."""
SIZES = (4, 5, 6, 7, 8)
LARGE, ORIGINAL = "203-800-26", "203-80-26"
BATCHES = MappingProxyType({LARGE: 32768, ORIGINAL: 1024})
"""Samples. Of the large network a quarter of NETtalk's 146,934 letters or so: exchanging its weights costs the same for any
batch, and is then a few per cent of an iteration even on a tenth of a core. The paper's own network is an iteration of some
2 ms of a core, less than its communication costs anywhere."""
GIGABIT, FAST_ETHERNET = 125e6, 12.5e6
_LATENCY_S = 50e-6

ORACLE = "oracle"
"""Is told every change, and lays the tiles for it at once."""
DDP, DDP_WEIGHTED, DDP_FLOAT16 = "ddp", "ddp-weighted", "ddp-weighted-float16"
RIVALS = (DDP, DDP_WEIGHTED, DDP_FLOAT16)
"""The last with float16 on the wire: torch has its bfloat16 hook for NCCL only."""
TIMED_BFLOAT16 = "timed-bfloat16"
"""As `timed`, planned for bfloat16 on the wire and with it."""
_GRIDS: Mapping[str, AbstractPlanner] = MappingProxyType({"even": EvenPlanner(), "h": GridPlanner(), "h-rev": GridRevPlanner()})
_STATIC = ("weighted", "srpm", "srpm-merged", "timed", ORACLE)


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """A way to re-map while training, that starts with speeds or from equal tiles."""

    retiler: Retiler
    speeds: bool = False


_DRPM = Retiler(planner="srpm", rule="settling")
DYNAMIC: Mapping[str, Dynamic] = MappingProxyType(
    {
        "drpm": Dynamic(retiler=_DRPM),
        "drpm-speeds": Dynamic(retiler=_DRPM, speeds=True),
        "drpm-timed": Dynamic(retiler=Retiler(rule="settling")),
        "drpm-timed-speeds": Dynamic(retiler=Retiler(rule="settling"), speeds=True),
        "notice": Dynamic(retiler=Retiler()),
        "notice-speeds": Dynamic(retiler=Retiler(), speeds=True),
        "published": Dynamic(retiler=Retiler.published()),
        "published-speeds": Dynamic(retiler=Retiler.published(), speeds=True),
        "T 0.4, 0.9": Dynamic(retiler=replace(_DRPM, t_line=0.9)),
        "T 0.3, 0.8": Dynamic(retiler=replace(_DRPM, t_whole=0.3)),
        "L 3": Dynamic(retiler=replace(_DRPM, window=3)),
        "L 8": Dynamic(retiler=replace(_DRPM, window=8)),
        "R 10": Dynamic(retiler=replace(_DRPM, every=10)),
        "R 30": Dynamic(retiler=replace(_DRPM, every=30)),
    }
)
"""DRPM as it is by default (thresholds 0.4 and 0.8, L = 6, R = 20), with the planner that predicts times, as published to the
letter, and with other settings."""


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """One host's speed changes in mid-run."""

    after_iteration: int
    host: str
    speed: float


@dataclass(frozen=True, kw_only=True)
class SlowTrace:
    """Machines that become slower and recover, and which contestants go through it.

    Attributes:
        seed: it was drawn with.
        changes: in order.
        contestants: in the order of their courses; an oracle is told every change.
    """

    seed: int
    changes: tuple[SpeedChange, ...]
    contestants: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """What the ranks of one lab measure, one contestant's block of iterations after the other's, in the same processes.

    Attributes:
        part: of the evaluation.
        condition, num: the test bed.
        net, samples: what is trained.
        bandwidth_bytes_per_s: of all links.
        contestants: names of `grids`, of static planners, of `DYNAMIC`, and of `RIVALS`.
        rounds, repeats: blocks of each contestant, and iterations of a block; after each round all ranks train alone.
        settle: iterations that a dynamic contestant has before it is measured.
        serial_s: how long every rank trains alone, once before, and once in all rounds together.
        course: iterations of each contestant's course, where courses are measured and not blocks.
        step: what happens in the middle of each course.
        traces: where courses are measured that machines become slow in, one trace after the other.
        paced: flop/s of a host of speed 1, where hosts last as long as these say; None where they have parts of a core.
        balance: flop that such a host does while it moves a byte.
    """

    part: str
    condition: Condition
    num: int
    net: str
    samples: int
    contestants: tuple[str, ...]
    bandwidth_bytes_per_s: float = GIGABIT
    rounds: int = 5
    repeats: int = 5
    settle: int = 41
    serial_s: float = 8.0
    course: int = 0
    step: SpeedChange | None = None
    traces: tuple[SlowTrace, ...] = ()
    seed: int = field(default=0)
    paced: float | None = None
    balance: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `job_from_dict` reads it back."""
        return asdict(self)

    @property
    def cluster(self) -> Cluster:
        """The test bed: each processor a host of its own."""
        unit = 1.0 if self.paced is None else self.paced
        return Cluster(
            processors=tuple(
                Processor(name=f"p{i}", speed=unit * speed, host=f"h{i}")
                for i, speed in enumerate(CONDITIONS[self.condition][: self.num])
            ),
            network=Link(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=_LATENCY_S),
        )


def job_from_dict(values: Mapping[str, Any]) -> EvaluationJob:
    """What `EvaluationJob.to_dict` wrote."""
    step = values["step"]
    read = {
        "contestants": tuple(values["contestants"]),
        "step": None if step is None else SpeedChange(**step),
        "traces": tuple(
            SlowTrace(
                seed=trace["seed"],
                changes=tuple(SpeedChange(**change) for change in trace["changes"]),
                contestants=tuple(trace["contestants"]),
            )
            for trace in values["traces"]
        ),
    }
    return EvaluationJob(**{**values, **read})


def grids(num: int) -> tuple[str, ...]:
    """Methods even, H and H_rev with each number of replicas N_DP that divides `num`, as `even-2`; the best counts."""
    return tuple(f"{name}-{replicas}" for name in _GRIDS for replicas in range(1, num + 1) if num % replicas == 0)


def method(contestant: str) -> str:
    """The method of a contestant: `even` for `even-2`, itself otherwise."""
    name, _, replicas = contestant.rpartition("-")
    return name if name in _GRIDS and replicas.isdigit() else contestant


def layout_of(contestant: str, *, cluster: Cluster, workload: Workload) -> Layout:
    """How a contestant begins, on a cluster of measured speeds.

    Raises:
        InputError: it is none that lays out tiles.
    """
    if contestant in DYNAMIC:
        dynamic = DYNAMIC[contestant]
        level = cluster if dynamic.speeds else with_equal_speeds(cluster)
        return plan(dynamic.retiler.planner, cluster=level, workload=workload).layout
    if contestant in _STATIC:
        return plan(
            DEFAULT_PLANNER if contestant == ORACLE else find_planner(contestant), cluster=cluster, workload=workload
        ).layout
    name, _, replicas = contestant.rpartition("-")
    if name not in _GRIDS or not replicas.isdigit():
        raise InputError(f"there is no contestant {contestant!r} of the evaluation that lays out tiles")
    chosen = _GRIDS[name].layout(cluster=cluster, workload=workload, cost=_Replicas(wanted=int(replicas)))
    if len(chosen.replicas) != int(replicas):
        raise InputError(f"{contestant}: {replicas} replicas do not divide {cluster.size} processors")
    return chosen


def with_equal_speeds(cluster: Cluster) -> Cluster:
    """The same machines with nothing known of their speeds: all have the mean."""
    mean = fsum(processor.speed for processor in cluster.processors) / cluster.size
    return replace(cluster, processors=tuple(replace(processor, speed=mean) for processor in cluster.processors))


def paper_efficiency(iteration_s: float, *, serial_s: Sequence[float]) -> float:
    """gamma = (1 / T_parallel) / sum_i (1 / T_serial_i) as in the paper, whose serial runs are each at their own moment.

    On a shared machine that is no sound figure: `tatami.report.efficiency` is.
    """
    return 1 / iteration_s / fsum(1 / each for each in serial_s)


@final
@dataclass(frozen=True, kw_only=True)
class _Replicas(AbstractCost):
    """Makes a planner that tries several numbers of replicas take this one."""

    wanted: int

    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:  # noqa: ARG002
        return Cost(compute=float(abs(len(layout.replicas) - self.wanted)), tensor_parallel=0.0, gradients=0.0, unit="elements")
