"""Planning from end to end: check the input, ask a planner, cut, leave out who gets nothing, price the result."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.bounds import VolumeBounds, time_bound_s, volume_bounds, volume_bytes
from tatami.tiling.cost import AbstractCost, Cost
from tatami.tiling.even import EvenPlanner
from tatami.tiling.grid import GridPlanner
from tatami.tiling.gridrev import GridRevPlanner
from tatami.tiling.layout import Layout
from tatami.tiling.merge import SrpmMergedPlanner
from tatami.tiling.paper import PaperCost
from tatami.tiling.planner import AbstractPlanner
from tatami.tiling.speeds import with_speeds
from tatami.tiling.srpm import SrpmPlanner
from tatami.tiling.tiling import Tiling
from tatami.tiling.timed import TimedPlanner
from tatami.tiling.weighted import WeightedPlanner
from tatami.units import format_duration
from tatami.workload import Workload

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
        bound_s: seconds that no tiling of this cluster can beat under that cost.
        volume_bytes: what all processors together send in an iteration.
        volume_bounds: what they would send at least, with tiles of the same areas but any shape.
        left_out: processors too slow for one sample and one unit, the first to go first.
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
    planned again. A warning names them; another one says where equal shares are predicted to be faster than this planner.

    Args:
        planner: a name in `PLANNERS`, or a planner of your own.
        speeds: other speeds than the cluster's, by name or in the order of the ranks.
        cost: what planners choose by where their method leaves a choice (the number of columns of a grid), and, if it is an
            `AlphaBetaCost`, what predicts the time. `AlphaBetaCost()` where None.

    Raises:
        PlanError: an unknown planner; speeds that cannot be; more processors than samples.
    """
    result = _planned(planner, cluster=cluster, workload=workload, speeds=speeds, cost=cost)
    if result.planner not in (EvenPlanner.name, TimedPlanner.name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            even = _planned(EvenPlanner(), cluster=cluster, workload=workload, speeds=speeds, cost=cost)
        if even.predicted_s * _WORTH_TELLING < result.predicted_s:
            warnings.warn(
                f"{result.planner} is predicted to take {format_duration(result.predicted_s, digits=3)} an iteration, and even "
                f"{format_duration(even.predicted_s, digits=3)}; planner={DEFAULT_PLANNER!r} takes the fastest that is known",
                stacklevel=2,
            )
    return result


def _planned(
    planner: str | AbstractPlanner,
    *,
    cluster: Cluster,
    workload: Workload,
    speeds: Mapping[str, float] | Sequence[float] | None,
    cost: AbstractCost | None,
) -> Plan:
    chosen = find_planner(planner) if isinstance(planner, str) else planner
    if speeds is not None:
        cluster = with_speeds(cluster, speeds)
    check_sizes(cluster, workload=workload)
    choose_by = AlphaBetaCost() if cost is None else cost
    layout, left_out = _fit(chosen, cluster=cluster, workload=workload, cost=choose_by)
    if left_out:
        warnings.warn(
            f"{chosen.name} leaves out {', '.join(left_out)}: too slow for one of {workload.samples} samples and one of "
            f"{workload.units} units beside the others. Plan without them, or give more samples",
            stacklevel=3,
        )
    time_cost = choose_by if isinstance(choose_by, AlphaBetaCost) else AlphaBetaCost()
    return Plan(
        planner=chosen.name,
        workload=workload,
        layout=layout,
        tiling=layout.cut(samples=workload.samples, units=workload.units),
        t_comm=PaperCost().price(layout, cluster=cluster, workload=workload).total,
        predicted=time_cost.price(layout, cluster=cluster, workload=workload),
        bound_s=time_bound_s(cluster, workload=workload, cost=time_cost),
        volume_bytes=volume_bytes(layout, workload=workload),
        volume_bounds=volume_bounds(
            [column.width * height for column in layout.columns for height in column.heights],
            alpha_bytes=workload.horizontal_bytes,
            beta_bytes=workload.vertical_bytes,
        ),
        left_out=left_out,
    )


def compare(
    planners: Sequence[str | AbstractPlanner] | None = None,
    *,
    cluster: Cluster,
    workload: Workload,
    speeds: Mapping[str, float] | Sequence[float] | None = None,
    cost: AbstractCost | None = None,
) -> tuple[Plan, ...]:
    """The plans of several planners (all of them where None), in their order, to put side by side. Raises as `plan`."""
    chosen = tuple(PLANNERS) if planners is None else planners
    return tuple(_planned(one, cluster=cluster, workload=workload, speeds=speeds, cost=cost) for one in chosen)


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
        raise PlanError(
            f"{cluster.size} processors are more than the {workload.samples} samples: some would have nothing to do. "
            "Take fewer processors or more samples"
        )


def _fit(
    planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost
) -> tuple[Layout, tuple[str, ...]]:
    """The layout in which every processor has work, and who had to be left out for it."""
    left_out: list[str] = []
    while True:
        layout = planner.layout(cluster=cluster, workload=workload, cost=cost)
        if set(layout.processors) != set(cluster.by_name):
            differ = sorted(set(layout.processors) ^ set(cluster.by_name))
            raise PlanError(
                f"planner {planner.name!r} must lay out every processor of the cluster once; these differ: {differ}"
            )
        empty = layout.empty(workload)
        if not empty:
            return layout, tuple(left_out)
        candidates = sorted(
            (processor for processor in cluster.processors if processor.name in empty), key=lambda processor: processor.speed
        )
        # Half of them at a time: ten thousand processors must not be planned ten thousand times.
        gone = {processor.name for processor in candidates[: (len(candidates) + 1) // 2]}
        left_out += [processor.name for processor in candidates if processor.name in gone]
        rest = tuple(processor for processor in cluster.processors if processor.name not in gone)
        assert rest, "whoever lies alone gets everything"
        cluster = replace(cluster, processors=rest)
