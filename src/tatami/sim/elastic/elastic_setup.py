"""What is rehearsed of a tiled run that loses and gains machines."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

from tatami.cluster import Cluster, Processor
from tatami.errors import InputError
from tatami.tiling import DEFAULT_PLANNER, AlphaBetaCost, Layout, plan
from tatami.workload import Workload

MOST_IN_VAIN = 100
"""Changes in a row without a step (restarts: without a checkpoint) after which a rehearsed run is given up."""


@dataclass(frozen=True, kw_only=True)
class LossySetup:
    """Machines that die and come back, and what answering costs. One rank on each machine.

    Attributes:
        cluster: the machines at the beginning, and their links.
        workload: what is trained.
        iterations: steps of the whole run.
        planner: lays out the work, at first and after each change.
        mtbf_s: mean of a machine's life, which is drawn; None: no life ends by chance.
        deaths: also: at so many seconds the machine with this number dies.
        back_s: so long after its death a machine joins again; None: it stays away.
        copies: holders that every unit has at least, as `tatami.membership.Membership` has it.
        halt_s: of a repair: from the death until all survivors have stopped and formed a group. A join costs the same.
        update_fraction: the share of an iteration that comes after its point: a death in it has no step redone.
        checkpoint_steps: of a restart: a checkpoint after so many steps.
        checkpoint_s: of a restart: what all wait for each checkpoint; 0 where it is written in the background.
        restart_s: of a restart: from the death until all train again, the checkpoint read.

    Raises:
        InputError: a number out of its range.
    """

    cluster: Cluster
    workload: Workload
    iterations: int
    planner: str = DEFAULT_PLANNER
    mtbf_s: float | None = None
    deaths: tuple[tuple[float, int], ...] = ()
    back_s: float | None = None
    copies: int = 2
    halt_s: float = 0.3
    update_fraction: float = 0.0
    checkpoint_steps: int = 100
    checkpoint_s: float = 0.0
    restart_s: float = 10.4

    def __post_init__(self) -> None:
        for name in ("mtbf_s", "back_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} must be a finite number > 0, not {value}")
        for name in ("halt_s", "checkpoint_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a finite number >= 0, not {getattr(self, name)}")
        for name in ("iterations", "checkpoint_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.copies not in (1, 2):
            raise InputError(f"copies must be 1 or 2, not {self.copies}")
        if not 0 <= self.update_fraction < 1:
            raise InputError(f"update_fraction must be a share of an iteration from 0 to below 1, not {self.update_fraction}")
        for at_s, number in self.deaths:
            if not (0 <= at_s < math.inf and 0 <= number < self.cluster.size):
                raise InputError(f"machine {number} of {self.cluster.size} cannot die at {at_s} s")

    def lay(self, processors: tuple[Processor, ...]) -> Layout:
        """How the work is laid out on these. Raises PlanError as `tatami.tiling.plan`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of machines left out it would tell again after each of many changes
            return plan(self.planner, cluster=self.among(processors), workload=self.workload).layout

    def iteration_s(self, layout: Layout, processors: tuple[Processor, ...]) -> float:
        """Predicted seconds of one step."""
        return AlphaBetaCost().price(layout, cluster=self.among(processors), workload=self.workload).total

    def among(self, processors: tuple[Processor, ...]) -> Cluster:
        """These processors, with the links of the cluster."""
        return replace(self.cluster, processors=processors)


@dataclass(frozen=True, kw_only=True)
class LossyRun:
    """Where its time went.

    Attributes:
        seed: of the lives.
        total_s: until the last step was done, or the run ended.
        steps: that were done, and stayed done.
        useful_s: of these steps, each with the machines that did it.
        redone_s: of work that was thrown away.
        stopped_s: in which all had stopped, or started again.
        moved_s: in which rows moved.
        saved_s: in which all waited for a checkpoint.
        deaths: of machines that the run had, or that waited to be let in.
        joins: of machines that came back.
        ended: why the run could not go on; None where it did all its steps.
    """

    seed: int
    total_s: float
    steps: int
    useful_s: float
    redone_s: float = 0.0
    stopped_s: float = 0.0
    moved_s: float = 0.0
    saved_s: float = 0.0
    deaths: int = 0
    joins: int = 0
    ended: str | None = None

    @property
    def lost_s(self) -> float:
        """What is not of steps that stayed done."""
        return self.total_s - self.useful_s

    @property
    def lost_fraction(self) -> float:
        """Fraction of the whole time that was lost; 0 for a run without time."""
        return self.lost_s / self.total_s if self.total_s else 0.0
