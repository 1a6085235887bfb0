"""Planning from end to end: check the input, ask a planner, cut, leave out who gets nothing, price the result."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tatami.cluster import Cluster, Processor
from tatami.errors import MemoryLackError, PlanError, shortened
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.bounds import VolumeBounds, time_bound_s, volume_bounds, volume_bytes
from tatami.tiling.compute import scatter, scatter_range
from tatami.tiling.cost import AbstractCost, Cost, RememberedCost
from tatami.tiling.even import EvenPlanner
from tatami.tiling.fit import fit, leaving_out, with_remedies
from tatami.tiling.grid import GridPlanner
from tatami.tiling.gridrev import GridRevPlanner
from tatami.tiling.layout import Layout
from tatami.tiling.memory import memory_bytes
from tatami.tiling.merge import SrpmMergedPlanner
from tatami.tiling.paper import PaperCost
from tatami.tiling.planner import AbstractPlanner
from tatami.tiling.speeds import with_speeds
from tatami.tiling.srpm import SrpmPlanner
from tatami.tiling.tiling import Tiling
from tatami.tiling.timed import TimedPlanner
from tatami.tiling.weighted import WeightedPlanner
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
        range_s: in which 90 % of the iterations are expected, by how far the measured speeds scatter (`Processor.spread`); None
            where that was not measured. What is wrong with speeds and links themselves is not in it.
        bound_s: seconds that no tiling of this cluster can beat under that cost.
        volume_bytes: what all processors together send in an iteration.
        volume_bounds: what they would send at least, with tiles of the same areas but any shape.
        left_out: processors with too little memory for what all repeat, those too slow for one sample and one unit, and those
            whose messages would take longer than their work saves; of each the first to go first.
        memory_bytes: what each processor will keep.
    """

    planner: str
    workload: Workload
    layout: Layout
    tiling: Tiling
    t_comm: float
    predicted: Cost
    bound_s: float
    volume_bytes: float
    volume_bounds: VolumeBounds
    left_out: tuple[str, ...] = ()
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    range_s: tuple[float, float] | None = None

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of an iteration."""
        return self.predicted.total

    @property
    def gap(self) -> float:
        """How far the predicted time is above its bound: predicted_s / bound_s - 1. 0 could not be better."""
        return self.predicted_s / self.bound_s - 1

    @property
    def volume_gap(self) -> float:
        """How far the volume is above LB3: volume_bytes / lb3 - 1; 0 where nothing is sent."""
        if self.volume_bounds.lb3 == 0:
            return 0.0 if self.volume_bytes == 0 else float("inf")
        return self.volume_bytes / self.volume_bounds.lb3 - 1

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
) -> Plan:
    """Lay out `workload` on `cluster`. Every rank gets the same answer from the same arguments, bit for bit.

    A processor that would get no sample, or no unit of any block, is left out: the slowest of them first, and the rest is
    planned again. So is one whose memory does not hold what all of a column repeat, and, by the planner of least predicted
    time, one whose messages (`Processor.message_s`) would take longer than its work saves. A warning names them; another one
    says where equal shares are predicted to be faster than this planner.

    Args:
        planner: a name in `PLANNERS`, or a planner of your own.
        speeds: other speeds than the cluster's, by name or in the order of the ranks.
        cost: what planners choose by where their method leaves a choice (the number of columns of a grid), and, if it is an
            `AlphaBetaCost`, what predicts the time. `AlphaBetaCost()` where None.

    Raises:
        PlanError: an unknown planner; invalid speeds, or speeds by size that the planner does not understand; more processors
            than samples.
        MemoryLackError: the processors do not hold the network; says who lacks how much, and what would do.
    """
    if speeds is not None:
        cluster = with_speeds(cluster, speeds)
    workload = as_probed(workload, cluster)
    cost = RememberedCost(AlphaBetaCost() if cost is None else cost)
    (result,) = compare([planner], cluster=cluster, workload=workload, cost=cost)
    if result.planner not in (EvenPlanner.name, TimedPlanner.name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What was asked for comes again where equal shares do not fit into memory.
            even = compare([EvenPlanner.name, planner], cluster=cluster, workload=workload, cost=cost)[0]
        if even.predicted_s * _WORTH_TELLING < result.predicted_s:
            warnings.warn(
                f"{result.planner} is predicted to take {format_duration(result.predicted_s, digits=3)} an iteration, and even "
                f"{format_duration(even.predicted_s, digits=3)}; planner={DEFAULT_PLANNER!r} takes the fastest that is known",
                stacklevel=2,
            )
    return result


def _planned(planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: RememberedCost) -> Plan:
    fitted = fit(planner, cluster=cluster, workload=workload, cost=cost)
    layout = fitted.layout
    for told in leaving_out(planner.name, fitted, cluster=cluster, workload=workload):
        warnings.warn(told, stacklevel=3)
    time_cost = cost.cost if isinstance(cost.cost, AlphaBetaCost) else AlphaBetaCost()
    predicted = (cost if time_cost is cost.cost else time_cost).price(layout, cluster=cluster, workload=workload)
    return Plan(
        planner=planner.name,
        workload=workload,
        layout=layout,
        tiling=layout.cut(samples=workload.samples, units=workload.units),
        t_comm=PaperCost().price(layout, cluster=cluster, workload=workload).total,
        predicted=predicted,
        range_s=_range_s(predicted, [cluster.by_name[name] for name in layout.processors]),
        bound_s=time_bound_s(cluster, workload=workload, cost=time_cost),
        volume_bytes=volume_bytes(layout, workload=workload, cluster=cluster),
        volume_bounds=volume_bounds(
            [column.width * height for column in layout.columns for height in column.heights],
            alpha_bytes=workload.horizontal_bytes,
            beta_bytes=workload.vertical_bytes,
        ),
        left_out=fitted.left_out,
        memory_bytes=memory_bytes(layout, workload=workload, cluster=cluster),
    )


def _range_s(predicted: Cost, processors: Sequence[Processor]) -> tuple[float, float] | None:
    ends = scatter_range(processors)
    if ends is None:
        return None
    expected = scatter(processors)
    times = (predicted.compute * (1 + end) / (1 + expected) for end in ends)
    low_s, high_s = (predicted.total - predicted.compute + time_s for time_s in times)
    return low_s, high_s


def compare(
    planners: Sequence[str | AbstractPlanner] | None = None,
    *,
    cluster: Cluster,
    workload: Workload,
    speeds: Mapping[str, float] | Sequence[float] | None = None,
    cost: AbstractCost | None = None,
) -> tuple[Plan, ...]:
    """The plans of several planners (all of them where None), in their order, to put side by side.

    Those whose layouts the memory does not hold are left out, with a warning, unless no other is left, and so are those of all
    that cannot plan with speeds by size. Raises as `plan`.
    """
    listed = [find_planner(one) if isinstance(one, str) else one for one in (tuple(PLANNERS) if planners is None else planners)]
    if speeds is not None:
        cluster = with_speeds(cluster, speeds)
    workload = as_probed(workload, cluster)
    check_sizes(cluster, workload=workload)
    listed = _that_know_sizes(listed, cluster=cluster, asked=planners is not None)
    choose_by = cost if isinstance(cost, RememberedCost) else RememberedCost(AlphaBetaCost() if cost is None else cost)
    plans, refused = [], []
    for planner in listed:
        try:
            plans.append(_planned(planner, cluster=cluster, workload=workload, cost=choose_by))
        except MemoryLackError as error:
            refused.append((planner, error))
    if not plans and refused:
        planner, lack = refused[-1]
        raise with_remedies(lack, planner, cluster=cluster, workload=workload, cost=choose_by)
    for _, lack in refused:
        warnings.warn(str(lack), stacklevel=2)
    return tuple(plans)


def _that_know_sizes(planners: list[AbstractPlanner], *, cluster: Cluster, asked: bool) -> list[AbstractPlanner]:
    """Those that can plan for speeds which depend on the size of the tile, where there are such; others that were asked for
    by name are refused."""
    able = [planner for planner in planners if planner.sized or not cluster.sized]
    unable = ", ".join(planner.name for planner in planners if planner not in able)
    if unable and asked:
        raise PlanError(
            f"{unable} can only plan with one speed for each processor, but those of {shortened(', '.join(cluster.sized))} "
            f"depend on the size of the tile: take planner {DEFAULT_PLANNER!r}, or give a number in place of the table"
        )
    if unable:
        warnings.warn(f"left out, as they need one speed for each processor: {unable}", stacklevel=3)
    return able


def find_planner(name: str) -> AbstractPlanner:
    """The planner of this name.

    Raises:
        PlanError: there is none; lists those there are.
    """
    if name not in PLANNERS:
        raise PlanError(f"there is no planner {name!r}; choose one of {', '.join(PLANNERS)}")
    return PLANNERS[name]


def check_sizes(cluster: Cluster, *, workload: Workload) -> None:
    """Whether every processor can get a sample.

    Raises:
        PlanError: more processors than samples.
    """
    if cluster.size > workload.samples:
        samples = "one sample" if workload.samples == 1 else f"the {workload.samples} samples"
        raise PlanError(
            f"{cluster.size} processors are more than {samples}: some would have nothing to do. "
            "Take fewer processors or more samples"
        )
