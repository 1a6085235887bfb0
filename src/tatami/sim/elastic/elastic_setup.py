"""What is rehearsed of a tiled run that loses and gains machines, and when they die and come back.

That is the same for a run that is repaired and one that is restarted, as far as both last.
"""

from __future__ import annotations

import heapq
import math
import warnings
from dataclasses import dataclass, replace

from tatami.cluster import Cluster, Processor
from tatami.errors import InputError
from tatami.sim.server.lifetimes import life_s
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


@dataclass(frozen=True, kw_only=True)
class MachineEvent:
    """A machine dies, or joins.

    Attributes:
        at_s: when.
        dies: or joins.
        processor: of the machine; where one comes back its name is a new one, since to the others it is a new rank.
    """

    at_s: float
    dies: bool
    processor: Processor


class MachineEvents:
    """What happens to the machines, in the order of time.

    Args:
        setup: how long they live, and are away.
        seed: of the lives.
    """

    def __init__(self, setup: LossySetup, *, seed: int) -> None:
        self._setup = setup
        self._seed = seed
        self._heap: list[tuple[float, int, bool, int]] = []
        self._generation = [0] * setup.cluster.size
        self._alive = [True] * setup.cluster.size
        for number in range(setup.cluster.size):
            self._live(number, from_s=0.0)
        for at_s, number in setup.deaths:
            heapq.heappush(self._heap, (at_s, number, True, -1))
        self._drop_void()

    @property
    def next_s(self) -> float:
        """When something happens next; infinity for never."""
        return self._heap[0][0] if self._heap else math.inf

    def first(self) -> dict[str, Processor]:
        """The machines at the beginning, by name."""
        return {processor.name: processor for processor in self._setup.cluster.processors}

    def take(self) -> MachineEvent:
        """What happens next."""
        at_s, number, dies, _ = heapq.heappop(self._heap)
        if dies:
            self._alive[number] = False
            event = MachineEvent(at_s=at_s, dies=True, processor=self._processor(number))
            if self._setup.back_s is not None:
                heapq.heappush(self._heap, (at_s + self._setup.back_s, number, False, 0))
        else:
            self._alive[number] = True
            self._generation[number] += 1
            event = MachineEvent(at_s=at_s, dies=False, processor=self._processor(number))
            self._live(number, from_s=at_s)
        self._drop_void()
        return event

    def _live(self, number: int, *, from_s: float) -> None:
        if self._setup.mtbf_s is not None:
            generation = self._generation[number]
            lasts_s = life_s(self._setup.mtbf_s, seed=self._seed, kind="machine", number=number, generation=generation)
            heapq.heappush(self._heap, (from_s + lasts_s, number, True, generation))

    def _drop_void(self) -> None:
        """Deaths of those that are dead by now do not happen."""
        while self._heap:
            _, number, dies, generation = self._heap[0]
            if not dies or (self._alive[number] and generation in (-1, self._generation[number])):
                return
            heapq.heappop(self._heap)

    def _processor(self, number: int) -> Processor:
        processor, generation = self._setup.cluster.processors[number], self._generation[number]
        return replace(processor, name=f"{processor.name}+{generation}") if generation else processor
