"""`tatami.plan`: the planners side by side for a network, before any rank is started."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from tatami import tiling
from tatami.cluster import Cluster, listed_speeds
from tatami.errors import InputError, MemoryLackError, PlanError
from tatami.report import Table, memory_table, planner_table, sized_table
from tatami.tiling import AbstractCost, AbstractPlanner, Plan, WeightedPlanner, advise, compare
from tatami.workload import Workload

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """The planners' answers for one workload on one cluster; printed, it is the table of `tatami plan`.

    Attributes:
        cluster: what was planned for.
        plans: one for each planner.
        weighted: weighted data parallelism, with which they are compared; None where memory does not allow it.
        summary: what of the network is tiled, in a line; empty where a workload was given.
    """

    cluster: Cluster
    plans: tuple[Plan, ...]
    weighted: Plan | None
    summary: str = ""

    @property
    def best(self) -> Plan:
        """The plan of least predicted time."""
        return min(self.plans, key=lambda plan: plan.predicted_s)

    @property
    def workload(self) -> Workload:
        """What was planned."""
        return self.plans[0].workload

    @property
    def advice(self) -> str:
        """Whether two-dimensional tiles are worth it, in a sentence."""
        if self.weighted is None:
            return "Data parallelism does not fit into the memory that there is; columns of several processors do."
        has_columns = any(len(column.processors) > 1 for column in self.best.layout.columns)
        return advise(self.weighted).sentence(self.weighted.predicted_s / self.best.predicted_s, has_columns=has_columns)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The planners, how full the memory is where it is given, and speeds that depend on the size of the tile."""
        table = planner_table(self.plans, weighted=self.weighted)
        others = (memory_table(self.plans, cluster=self.cluster), sized_table(self.best, cluster=self.cluster))
        return (table, *(each for each in others if each is not None))

    def __str__(self) -> str:
        return "\n\n".join(part for part in (self.summary, *(table.to_text() for table in self.tables), self.advice) if part)


@overload
def plan(
    model: nn.Module | Workload,
    *,
    cluster: Cluster | None = None,
    speeds: Mapping[str, float] | Sequence[float] | None = None,
    batch_size: int | None = None,
    sample: Any = None,
    planners: Sequence[str | AbstractPlanner] | None = None,
    cost: AbstractCost | None = None,
) -> PlanComparison: ...
@overload
def plan(
    model: str | AbstractPlanner = tiling.DEFAULT_PLANNER,
    *,
    cluster: Cluster,
    workload: Workload,
    speeds: Mapping[str, float] | Sequence[float] | None = None,
    cost: AbstractCost | None = None,
) -> Plan: ...
def plan(
    model: nn.Module | Workload | str | AbstractPlanner = tiling.DEFAULT_PLANNER,
    *,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    speeds: Mapping[str, float] | Sequence[float] | None = None,
    batch_size: int | None = None,
    sample: Any = None,
    planners: Sequence[str | AbstractPlanner] | None = None,
    cost: AbstractCost | None = None,
) -> PlanComparison | Plan:
    """Compare how `model` can be laid over machines that are not alike, without starting a rank.

        print(tatami.plan(network, speeds=[1, 1, 0.5], batch_size=64, sample=x[:4]))

    The network is followed as `tatami.tile` follows it, and is not changed. Given a planner in place of a model, this is
    `tatami.tiling.plan(planner, cluster=..., workload=...)`, which returns that planner's `Plan`.

    Args:
        model: any network, or the `Workload` of one; or a planner, with `workload`.
        cluster: the machines and their links: a `Cluster`, as `tatami.cluster.read_cluster` reads it from a file.
        speeds: their relative speeds, in the order of the ranks; with a cluster, in place of its own.
        batch_size: the global batch. A workload has its own, and needs none.
        sample: inputs of the network for at least two samples, as for `tatami.tile`: without it only pairs of linear layers
            are found.
        planners: names in `tatami.tiling.PLANNERS`, or planners of your own; all that there are where None.
        cost: what planners minimise, and, if it is an `AlphaBetaCost`, what predicts the time.

    Raises:
        ModelError: a layer that a tiled run could not compute exactly.
        PlanError: neither a cluster nor speeds, unusable speeds, no batch size, or one below the number of processors.
        MemoryLackError: the processors do not hold the network; says who lacks how much, and what would do.
    """
    if isinstance(model, (str, AbstractPlanner)):
        if cluster is None or workload is None:
            raise PlanError(
                f"{model!r} is a planner, and needs a cluster and a workload to plan. To compare planners for a network, give "
                "the network: tatami.plan(network, speeds=[1, 1, 0.5], batch_size=64)"
            )
        return tiling.plan(model, cluster=cluster, workload=workload, speeds=speeds, cost=cost)
    if workload is not None:
        raise PlanError("workload= goes with a planner; give the workload in place of the network: tatami.plan(workload, ...)")
    machines = _machines(cluster, speeds)
    summary = ""
    if isinstance(model, Workload):
        work = model if batch_size is None else model.with_samples(batch_size)
    else:
        work, summary = _followed(model, batch_size=batch_size, sample=sample)
    return compared(planners, cluster=machines, workload=work, cost=cost, summary=summary)


def compared(
    planners: Sequence[str | AbstractPlanner] | None,
    *,
    cluster: Cluster,
    workload: Workload,
    cost: AbstractCost | None = None,
    summary: str = "",
) -> PlanComparison:
    """The comparison of a workload. Raises as `tatami.tiling.plan`."""
    plans = compare(planners, cluster=cluster, workload=workload, cost=cost)
    weighted = _weighted(plans, cluster=cluster, workload=workload, cost=cost)
    return PlanComparison(cluster=cluster, plans=plans, weighted=weighted, summary=summary)


def _followed(model: nn.Module, *, batch_size: int | None, sample: Any) -> tuple[Workload, str]:
    """The workload of a network, and what of it is tiled in a line."""
    from torch import nn

    from tatami.tiled.blocks import find_blocks, workload_of
    from tatami.tiled.describing import describe

    if not isinstance(model, nn.Module):
        raise InputError(
            f"tatami.plan takes a network (nn.Module), a Workload, or the name of a planner, not {type(model).__name__}"
        )
    if batch_size is None:
        raise PlanError("how many samples has the global batch? Give batch_size")
    found = find_blocks(model, sample=sample)
    work = workload_of(model, found, samples=batch_size)
    return work, describe(model, found, workload=work).summary


def _machines(cluster: Cluster | None, speeds: Mapping[str, float] | Sequence[float] | None) -> Cluster:
    if cluster is None and speeds is None:
        raise PlanError("which machines? Give a cluster (tatami.cluster.read_cluster reads a file of tatami probe), or speeds")
    if cluster is not None:
        return cluster if speeds is None else tiling.with_speeds(cluster, speeds)
    if isinstance(speeds, Mapping):
        raise PlanError("speeds by name go with a cluster; without one, give a number for each rank")
    return Cluster.from_speeds(listed_speeds(speeds, error=PlanError))


def _weighted(plans: Sequence[Plan], *, cluster: Cluster, workload: Workload, cost: AbstractCost | None) -> Plan | None:
    """Weighted data parallelism, where memory allows it; who it leaves out was told of the plans that were asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            (found,) = [plan for plan in plans if plan.planner == WeightedPlanner.name] or compare(
                [WeightedPlanner.name], cluster=cluster, workload=workload, cost=cost
            )
        except MemoryLackError:
            return None
    return found
