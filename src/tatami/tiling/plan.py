"""Planning from end to end: check the input, ask a planner, cut, leave out who gets nothing, price the result."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tatami.cluster import Cluster
from tatami.errors import MemoryLackError, PlanError, warn
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.bounds import time_bound_s, volume_bytes
from tatami.tiling.cost import AbstractCost, Cost, PaperCost, RememberedCost
from tatami.tiling.expected_range import expected_range_s
from tatami.tiling.fit import fit
from tatami.tiling.grid import GridPlanner, GridRevPlanner
from tatami.tiling.lack import with_remedies
from tatami.tiling.layout import Layout
from tatami.tiling.left_out import Reason, warnings_of
from tatami.tiling.memory import memory_bytes
from tatami.tiling.merge import SrpmMergedPlanner
from tatami.tiling.planner import AbstractPlanner
from tatami.tiling.speeds import with_speeds
from tatami.tiling.srpm import SrpmPlanner
from tatami.tiling.tiling import Tiling
from tatami.tiling.timed import TimedPlanner
from tatami.tiling.weighted import EvenPlanner, WeightedPlanner
from tatami.units import format_duration
from tatami.workload import Workload, as_probed

PLANNERS: dict[str, AbstractPlanner] = {
    planner.name: planner
    for planner in (
        EvenPlanner(),
        GridPlanner(),
        GridRevPlanner(),
        SrpmPlanner(),
        SrpmMergedPlanner(),
        WeightedPlanner(),
        TimedPlanner(),
    )
}
"""The planners by name. A planner of your own joins with `PLANNERS[planner.name] = planner`."""
DEFAULT_PLANNER = TimedPlanner.name
"""The one of least predicted time. Methods that count elements or areas alone are one word away."""
_WORTH_TELLING = 1.01


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planner's answer.

    Attributes:
        planner: its name.
        workload: what was planned.
        layout: who lies where, in fractions.
        tiling: the layout cut at `workload.samples` x `workload.units`.
        t_comm: Eq. 8, in elements.
        predicted: seconds of an iteration under the alpha-beta cost, by what they are spent on.
        range_s: in which 90 % of the iterations are expected, if speeds and links are as the cluster has them.
        bound_s: seconds that no tiling of this cluster can beat under that cost.
        volume_bytes: what all processors together send in an iteration.
        reasons: by the name of each processor that is left out, why; those first that were left out first.
        memory_bytes: what each processor will keep.
    """

    planner: str
    workload: Workload
    layout: Layout
    tiling: Tiling
    t_comm: float
    predicted: Cost
    range_s: tuple[float, float]
    bound_s: float
    volume_bytes: float
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    memory_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the processors that are left out."""
        return tuple(self.reasons)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of an iteration."""
        return self.predicted.total

    @property
    def gap(self) -> float:
        """How far the predicted time is above its bound: predicted_s / bound_s - 1. 0 could not be better."""
        return self.predicted_s / self.bound_s - 1

    def tilings(self) -> tuple[Tiling, ...]:
        """One tiling for each block of the workload, with each block's own units."""
        return self.layout.cut_blocks(self.workload)


def plan(
    planner: str | AbstractPlanner = DEFAULT_PLANNER,
    *,
    cluster: Cluster,
    workload: Workload,
    speeds: Mapping[str, float] | Sequence[float] | None = None,
    cost: AbstractCost | None = None,
    micro_batches: int | None = None,
    idle: bool = False,
) -> Plan:
    """Lay out `workload` on `cluster`. Every rank gets the same answer from the same arguments, bit for bit.

    A processor that would get no sample, or no unit of any block, is left out: the slowest of them first, and the rest is
    planned again. So is one whose memory does not hold what all of a replica repeat. The planner of least predicted time also
    leaves out those without which an iteration is predicted to be shorter, because they are slow or their link or messages
    are, but only where speeds are flop/s (or `AlphaBetaCost.flop_per_s` is given): relative speeds do not say whether computing
    or communication takes longer. A warning names them; another one says where equal shares are predicted to be faster than
    this planner.

    Every replica computes in as few micro-batches as its memory allows, or more where speeds by size say that they are faster.

    Args:
        planner: a name in `PLANNERS`, or a planner of your own.
        speeds: other speeds than the cluster's, by name or in the order of the ranks.
        cost: what planners choose by where their method leaves a choice (the number of replicas of a grid), and, if it is an
            `AlphaBetaCost`, what predicts the time. `AlphaBetaCost()` where None.
        micro_batches: in how many every replica computes; None: as the planner finds best.
        idle: whether processors that are left out are in the run all the same, as ranks without a tile, so that what they cost
            counts; otherwise the run is one of the others.

    Raises:
        PlanError: an unknown planner; invalid speeds, or speeds by size that the planner does not understand.
        MemoryLackError: the processors do not hold the network; says who lacks how much, and what would do.
    """
    if speeds is not None:
        cluster = with_speeds(cluster, speeds)
    workload = as_probed(workload, cluster)
    cost = RememberedCost(AlphaBetaCost() if cost is None else cost)
    if micro_batches is not None:
        workload = replace(workload, micro_batches=micro_batches)
    (result,) = compare([planner], cluster=cluster, workload=workload, cost=cost, idle=idle)
    if result.planner not in (EvenPlanner.name, TimedPlanner.name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What was asked for comes again where equal shares do not fit into memory.
            even = compare([EvenPlanner.name, planner], cluster=cluster, workload=workload, cost=cost, idle=idle)[0]
        if even.predicted_s * _WORTH_TELLING < result.predicted_s:
            warn(
                f"{result.planner} is predicted to take {format_duration(result.predicted_s, digits=3)} an iteration, and even "
                f"{format_duration(even.predicted_s, digits=3)}; planner={DEFAULT_PLANNER!r} takes the fastest that is known"
            )
    return result


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage meanwhile: planning for thousands of processors makes millions of objects and no cycles of them,
    and looking for some takes 10 to 20 % of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@uncollected()
def _planned(planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: RememberedCost, idle: bool) -> Plan:
    fitted = fit(planner, cluster=cluster, workload=workload, cost=cost, idle=idle)
    layout = fitted.layout
    run = cluster if idle else cluster.only(layout.processors)
    for told in warnings_of(planner.name, fitted, cluster=cluster, workload=workload):
        warn(told)
    time_cost = cost.cost if isinstance(cost.cost, AlphaBetaCost) else AlphaBetaCost()
    predicted = (cost if time_cost is cost.cost else time_cost).price(layout, cluster=run, workload=workload)
    return Plan(
        planner=planner.name,
        workload=workload,
        layout=layout,
        tiling=layout.cut(samples=workload.samples, units=workload.units),
        t_comm=PaperCost().price(layout, cluster=run, workload=workload).total,
        predicted=predicted,
        range_s=expected_range_s(
            predicted.total, compute_s=predicted.compute, processors=[cluster.by_name[name] for name in layout.processors]
        ),
        bound_s=time_bound_s(cluster, workload=workload, cost=time_cost),
        volume_bytes=volume_bytes(layout, workload=workload, cluster=run),
        reasons=fitted.reasons,
        memory_bytes=memory_bytes(layout, workload=workload, cluster=run),
    )


def compare(
    planners: Sequence[str | AbstractPlanner] | None = None,
    *,
    cluster: Cluster,
    workload: Workload,
    speeds: Mapping[str, float] | Sequence[float] | None = None,
    cost: AbstractCost | None = None,
    idle: bool = False,
) -> tuple[Plan, ...]:
    """The plans of several planners (all of them where None), in their order, to put side by side.

    Those whose layouts the memory does not hold are left out, with a warning, unless no other is left, and so are those of all
    that cannot plan with speeds by size. Raises as `plan`.
    """
    listed = [find_planner(one) if isinstance(one, str) else one for one in (tuple(PLANNERS) if planners is None else planners)]
    if speeds is not None:
        cluster = with_speeds(cluster, speeds)
    workload = as_probed(workload, cluster)
    choose_by = cost if isinstance(cost, RememberedCost) else RememberedCost(AlphaBetaCost() if cost is None else cost)
    plans, refused = [], []
    for planner in listed:
        try:
            plans.append(_planned(planner, cluster=cluster, workload=workload, cost=choose_by, idle=idle))
        except MemoryLackError as error:
            refused.append((planner, error))
    if not plans and refused:
        planner, lack = refused[-1]
        raise with_remedies(lack, planner, cluster=cluster, workload=workload, cost=choose_by)
    for _, lack in refused:
        warn(str(lack))
    return tuple(plans)


def find_planner(name: str) -> AbstractPlanner:
    """The planner of this name.

    Raises:
        PlanError: there is none; lists those there are.
    """
    if name not in PLANNERS:
        raise PlanError(f"there is no planner {name!r}; choose one of {', '.join(PLANNERS)}")
    return PLANNERS[name]
