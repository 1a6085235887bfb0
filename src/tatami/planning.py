"""`tatami.plan`: the planners side by side for a network, before any rank is started."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tatami import tiling
from tatami.cluster import Cluster, fastest, listed_speeds, read_cluster
from tatami.cluster.changes import changed, nearest_to, with_more, without
from tatami.errors import InputError, MemoryLackError, ModelError, PlanError
from tatami.inputs import check_at_least
from tatami.report.machines import display_names, machine_lines, machine_table
from tatami.report.recommended import plan_table, recommendation, time_words
from tatami.report.staged import staged_lines, staged_recommendation, staged_time_words
from tatami.report.tables import Table, sized_table
from tatami.report.words import wrapped
from tatami.tiling import (
    AbstractCost,
    AbstractPlanner,
    AlphaBetaCost,
    Plan,
    ProcessorTime,
    StagedPlan,
    WeightedPlanner,
    advise,
    choose,
    compare,
    fastest_alone,
    limits,
    plan_stages,
    timeline,
)
from tatami.workload import Workload, as_probed

if TYPE_CHECKING:
    from torch import nn


WIDTH = 100
"""Characters of a line, where nothing is said."""
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """The planners' answers for one workload on one cluster; printed, it is what `tatami plan` says.

    Attributes:
        cluster: what was planned for.
        plans: one for each planner.
        weighted: weighted data parallelism, with which they are compared; None where memory does not allow it.
        alone: the machine that is fastest by itself; None where none holds the network.
        cost: predicts the time, where it is not `AlphaBetaCost()`.
        summary: what of the network is tiled, in a line; empty where a workload was given.
        network: what the network is called; None where it has no name.
        staged: the fastest plan with pipeline stages; None where there is none, or where planners were asked for by name.
        must_be_staged: whether a plan with stages was asked for.
        is_asked: whether nothing was chosen: one planner was asked for by name, or a plan with stages.
    """

    cluster: Cluster
    plans: tuple[Plan, ...]
    weighted: Plan | None
    alone: Plan | None
    cost: AlphaBetaCost | None = None
    summary: str = ""
    network: str | None = None
    staged: StagedPlan | None = None
    must_be_staged: bool = False
    is_asked: bool = False

    @property
    def recommended(self) -> Plan | StagedPlan:
        """The plan of a planner or that with stages, as `tatami.tiling.choose` has it."""
        if self.staged is not None and self.must_be_staged:
            return self.staged
        found = choose(self.best if self.plans else None, self.staged)
        assert found is not None, "without plans there are stages"
        return found

    @property
    def best(self) -> Plan:
        """The plan of least predicted time; of equal ones the default planner's."""
        least_s = min(plan.predicted_s for plan in self.plans)
        equal = [plan for plan in self.plans if plan.predicted_s <= least_s * (1 + _ROUNDING)]
        return next((plan for plan in equal if plan.planner == tiling.DEFAULT_PLANNER), equal[0])

    @property
    def workload(self) -> Workload:
        """What was planned."""
        return (self.plans[0] if self.plans else self.recommended).workload

    @property
    def advice(self) -> str:
        """Whether two-dimensional tiles are worth it by the rule of thumb, in a sentence."""
        if self.weighted is None:
            return "Data parallelism does not fit into the memory that there is; replicas of several processors do."
        has_replicas = any(len(replica.processors) > 1 for replica in self.best.layout.replicas)
        return advise(self.weighted).sentence(self.weighted.predicted_s / self.best.predicted_s, has_replicas=has_replicas)

    @property
    def is_measured(self) -> bool:
        """Whether speeds are flop/s, so that seconds are more than a guess."""
        return (self.cost or AlphaBetaCost()).scale(self.cluster) == 1.0 or self.cost is not None

    @cached_property
    def times(self) -> tuple[ProcessorTime, ...]:
        """What each processor of the best plan does in an iteration."""
        run = self.cluster.only(self.best.layout.processors)
        return timeline(self.best.layout, cluster=run, workload=self.workload, cost=self.cost)

    def report(self, *, width: int = WIDTH, everything: bool = False) -> tuple[str | Table, ...]:
        """The answer for people: the recommended plan, where its time goes, and what it is compared with.

        Args:
            width: characters of a line.
            everything: also the plans of all planners, speeds by the size of the tile, and the rule of thumb for tiles.
        """
        if isinstance(self.recommended, StagedPlan):
            return self._staged_report(self.recommended, width=width, everything=everything)
        best = self.best
        found = limits(best, cluster=self.cluster, cost=self.cost)
        with_idle = (self.cost or AlphaBetaCost()).price(best.layout, cluster=self.cluster, workload=self.workload)
        lines = machine_lines(best, cluster=self.cluster, times=self.times)
        parts: list[str | Table] = [
            recommendation(best, cluster=self.cluster, width=width, with_idle_s=with_idle.total, is_asked=self.is_asked),
            machine_table(lines, names=display_names(self.cluster), width=width),
            time_words(best, cluster=self.cluster, found=found, is_measured=self.is_measured, width=width),
            self._table(best, shown=self.plans if everything else (best,)),
        ]
        if everything:
            sized = sized_table(best, cluster=self.cluster)
            parts += [wrapped(self.advice, width=width)] if sized is None else [sized, wrapped(self.advice, width=width)]
        return (wrapped(self.summary, width=width), *parts) if self.summary else tuple(parts)

    def _staged_report(self, plan: StagedPlan, *, width: int, everything: bool) -> tuple[str | Table, ...]:
        scale = (self.cost or AlphaBetaCost()).scale(self.cluster)
        speeds = sum(fastest(speed) for speed in self.cluster.speeds.values()) * scale
        ideal_s = plan.workload.flop(width=1.0, height=1.0) / speeds
        shown = self.plans if everything else (self.best,) if self.plans else ()
        parts = (
            staged_recommendation(plan, cluster=self.cluster, width=width, is_asked=self.is_asked),
            machine_table(staged_lines(plan), names=display_names(self.cluster), width=width),
            staged_time_words(plan, ideal_s=ideal_s, cluster=self.cluster, width=width),
            self._table(plan, shown=shown),
        )
        return (wrapped(self.summary, width=width), *parts) if self.summary else parts

    def _table(self, recommended: Plan | StagedPlan, *, shown: Sequence[Plan]) -> Table:
        return plan_table(
            plans=shown,
            best=recommended,
            weighted=self.weighted,
            alone=self.alone,
            cluster=self.cluster,
            staged=self.staged,
            network=self.network,
            is_asked=self.is_asked,
        )

    def __str__(self) -> str:
        parts = self.report(everything=True)
        return "\n\n".join(part if isinstance(part, str) else part.to_text() for part in parts)


@overload
def plan(
    model: nn.Module | Workload,
    *,
    cluster: Cluster | Path | str | None = None,
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
    cluster: Cluster | Path | str,
    workload: Workload,
    speeds: Mapping[str, float] | Sequence[float] | None = None,
    cost: AbstractCost | None = None,
) -> Plan: ...
def plan(
    model: nn.Module | Workload | str | AbstractPlanner = tiling.DEFAULT_PLANNER,
    *,
    cluster: Cluster | Path | str | None = None,
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
        cluster: the machines and their links: a `Cluster`, or the path of a file that `tatami.cluster.read_cluster` reads.
        speeds: their relative speeds, in the order of the ranks; with a cluster, in place of its own.
        batch_size: the global batch. A workload has its own, and needs none.
        sample: inputs of the network for at least two samples, as for `tatami.tile`: without it only pairs of linear layers
            are found, and no pipeline stages.
        planners: names in `tatami.tiling.PLANNERS`, or planners of your own; all that there are, and stages, where None.
        cost: what planners minimise, and, if it is an `AlphaBetaCost`, what predicts the time.

    Raises:
        ModelError: a layer that a tiled run could not compute exactly.
        PlanError: neither a cluster nor speeds, unusable speeds, or no batch size.
        MemoryLackError: the processors do not hold the network; says who lacks how much, and what would do.
    """
    if isinstance(cluster, (str, Path)):
        cluster = read_cluster(cluster)
    if isinstance(model, (str, AbstractPlanner)):
        if cluster is None or workload is None:
            raise PlanError(
                f"{model!r} is a planner, and needs a cluster and a workload to plan. To compare planners for a network, give "
                "the network: tatami.plan(network, speeds=[1, 1, 0.5], batch_size=64)"
            )
        return tiling.plan(model, cluster=cluster, workload=workload, speeds=speeds, cost=cost)
    if workload is not None:
        raise PlanError("workload= goes with a planner; give the workload in place of the network: tatami.plan(workload, ...)")
    check_at_least(1, batch_size=batch_size)
    if planners is not None and not planners:
        raise PlanError("planners=[] names none: leave it out to compare all planners, or name some of tatami.tiling.PLANNERS")
    machines = _machines(cluster, speeds)
    summary = ""
    if isinstance(model, Workload):
        work = model if batch_size is None else model.with_samples(batch_size)
    else:
        work, summary = _followed(model, batch_size=batch_size, sample=sample, cluster=machines, with_stages=planners is None)
    return compared(planners, cluster=machines, workload=work, cost=cost, summary=summary, with_stages=planners is None)


def compared(
    planners: Sequence[str | AbstractPlanner] | None,
    *,
    cluster: Cluster,
    workload: Workload,
    cost: AbstractCost | None = None,
    summary: str = "",
    network: str | None = None,
    with_stages: bool = False,
    stages: int | None = None,
    micro_batches: int | None = None,
    recompute: bool | None = None,
) -> PlanComparison:
    """The comparison of a workload.

    Args:
        planners, cluster, workload, cost: as `plan` has them.
        summary, network: as `PlanComparison` has them.
        with_stages: whether plans with pipeline stages are among the candidates.
        stages: how many pipeline stages the recommended plan has; 1: none; None: as is fastest.
        micro_batches: in which every replica computes its samples; None: as is fastest.
        recompute: whether all processors recompute activations, or none; None: those that have too little memory otherwise.

    Raises:
        PlanError: as `tatami.tiling.plan` and `plan_stages`; or stages of a network whose pieces are not known.
        MemoryLackError: neither a planner nor stages find room.
    """
    workload = _as_asked(workload, stages=stages, micro_batches=micro_batches, recompute=recompute)
    model = cost if isinstance(cost, AlphaBetaCost) else None
    must_be_staged = stages is not None and stages > 1
    staged = None
    if must_be_staged or (with_stages and stages is None):
        staged = plan_stages(cluster, workload, stages=stages, cost=model)
        if staged is None and must_be_staged:
            raise MemoryLackError(
                f"{stages} pipeline stages find no room for this network: take another number of stages", lacking_bytes={}
            )
    plans: tuple[Plan, ...] = ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            plans = compare(planners, cluster=cluster, workload=workload, cost=cost)
        except PlanError as error:
            if staged is None or not (isinstance(error, MemoryLackError) or cluster.size > workload.samples):
                raise
    result = PlanComparison(
        cluster=cluster,
        plans=plans,
        weighted=_weighted(plans, cluster=cluster, workload=workload, cost=cost) if plans else None,
        alone=fastest_alone(cluster, workload=workload, cost=cost),
        cost=model,
        summary=summary,
        network=network,
        staged=staged,
        must_be_staged=must_be_staged,
        is_asked=must_be_staged or (planners is not None and len(planners) == 1 and not with_stages),
    )
    if not isinstance(result.recommended, StagedPlan):  # they say whom the planners leave out
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return result


def _as_asked(workload: Workload, *, stages: int | None, micro_batches: int | None, recompute: bool | None) -> Workload:
    """The workload, with what is to be done in any case. Raises `PlanError` where this network cannot."""
    if micro_batches is not None:
        if micro_batches > workload.samples:
            raise PlanError(f"{micro_batches} micro-batches are more than the {workload.samples} samples: take at most as many")
        workload = replace(workload, micro_batches=micro_batches)
    if recompute and workload.recomputation is None:
        raise PlanError("activations cannot be recomputed: this network has no repeated layers. Leave recomputation out")
    workload = workload if recompute is None else replace(workload, recompute=recompute)
    if stages is not None and stages > 1 and not workload.pieces:
        raise PlanError(
            "the pieces of this network are not known, so it cannot be cut into stages: leave out the number of stages"
        )
    return workload


@dataclass(frozen=True, kw_only=True)
class Question:
    """What would another link, machine or batch bring? `assumed` is said of a machine that is added; empty: nothing."""

    words: str
    cluster: Cluster
    workload: Workload
    assumed: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best plan of what is asked.

    Attributes:
        question: what was asked.
        plan: None where there is no room for the network.
        speed_up: samples a second over those of the first question; None where either has no plan.
    """

    question: Question
    plan: Plan | StagedPlan | None
    speed_up: float | None

    @property
    def takes_part(self) -> tuple[str, ...]:
        """The processors that have work, in the order of the cluster."""
        placed = set(self.plan.layout.processors) if self.plan is not None else set()
        return tuple(each.name for each in self.question.cluster.processors if each.name in placed)


def questions(
    cluster: Cluster, *, workload: Workload, vary: Sequence[str] = (), add: Sequence[str] = (), leave_out: Sequence[str] = ()
) -> tuple[Question, ...]:
    """The cluster as it is, and one question for each change of it.

    Args:
        cluster: the machines.
        workload: what they compute.
        vary: "PATH=VALUE,VALUE,..." each; a PATH is one of `tatami.cluster.changes.PATHS`, or "samples".
        add: machines, as `tatami.cluster.changes.with_more` reads them.
        leave_out: names of processors or hosts, with commas between those that go together.

    Raises:
        InputError: an unknown path or name, or a value that does not fit; says what there is.
    """
    found = [Question(words="no change", cluster=cluster, workload=workload)]
    for each in vary:
        path, equals, values = (part.strip() for part in each.partition("="))
        if not (equals and values):
            raise InputError(f"{each!r} varies nothing: write PATH=VALUE,VALUE, as network.bandwidth=1Gbit/s,10Gbit/s")
        for value in (text.strip() for text in values.split(",")):
            if path == "samples":
                varied = Question(words=f"{path} {value}", cluster=cluster, workload=workload.with_samples(_samples(value)))
            else:
                varied = Question(words=f"{path} {value}", cluster=changed(cluster, path, value), workload=workload)
            found.append(varied)
    for each in add:
        more, assumed = with_more(cluster, each), ""
        if cluster.messages_known or cluster.calls_known:
            new = more.processors[cluster.size]
            near = nearest_to(cluster, new.speed).name
            assumed = (
                f"Messages and calls are assumed to cost {new.name} what they cost {near}, nearest in speed, unless given."
            )
        found.append(Question(words=f"with {each}", cluster=more, workload=workload, assumed=assumed))
    for each in leave_out:
        names = [name.strip() for name in each.split(",")]
        found.append(Question(words=f"without {', '.join(names)}", cluster=without(cluster, names), workload=workload))
    return tuple(found)


def answers(
    asked: Sequence[Question],
    *,
    cost: AbstractCost | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    recompute: bool | None = None,
) -> tuple[Answer, ...]:
    """A plan for each question. Arguments and errors are those of `compared`, but for lack of memory."""
    plans: list[Plan | StagedPlan | None] = []
    model = cost if isinstance(cost, AlphaBetaCost) else None
    for question in asked:
        workload = _as_asked(question.workload, stages=stages, micro_batches=micro_batches, recompute=recompute)
        found: Plan | None = None
        with contextlib.suppress(MemoryLackError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who takes part is part of the answer
            found = tiling.plan(cluster=question.cluster, workload=workload, cost=cost) if stages in (None, 1) else None
        staged = None if stages == 1 else plan_stages(question.cluster, workload, stages=stages, cost=model)
        plans.append(choose(found, staged))
    rates = [None if plan is None else plan.workload.samples / plan.predicted_s for plan in plans]
    return tuple(
        Answer(question=question, plan=plan, speed_up=rate / rates[0] if rate and rates[0] else None)
        for question, plan, rate in zip(asked, plans, rates, strict=True)
    )


def _samples(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise InputError(f"samples: must be a whole number of at least 1, not {text!r}")
    return int(text)


def _followed(
    model: nn.Module, *, batch_size: int | None, sample: Any, cluster: Cluster, with_stages: bool
) -> tuple[Workload, str]:
    """The workload of a network on the CPUs of a cluster, as `tatami.tile` plans it, and what of it is tiled in a line."""
    from torch import nn

    from tatami.model.describing import describe
    from tatami.partition.blocks import find_blocks, workload_of
    from tatami.partition.pieces import exact_pieces

    if not isinstance(model, nn.Module):
        raise InputError(
            f"tatami.plan takes a network (nn.Module), a Workload, or the name of a planner, not {type(model).__name__}"
        )
    if batch_size is None:
        raise PlanError("how many samples has the global batch? Give batch_size")
    found = find_blocks(model, sample=sample)
    work = as_probed(workload_of(model, found, samples=batch_size), cluster)
    work = replace(work, overlaps_sums=len(set(cluster.host_of.values())) > 1)
    summary = describe(model, found, workload=work).summary
    if with_stages and sample is not None and cluster.size > 1:
        try:
            network = exact_pieces(model, found, sample)
            network.refuse_few(2 if network.obstacle else 1)
            work = replace(work, pieces=network.pieces_with(found, work.blocks))
        except ModelError as error:
            summary += f"; without pipeline stages: {error}"
    return work, summary


def _machines(cluster: Cluster | None, speeds: Mapping[str, float] | Sequence[float] | None) -> Cluster:
    if cluster is None and speeds is None:
        raise PlanError("which machines? Give a cluster (the file of tatami probe, or a Cluster), or speeds")
    if not isinstance(cluster, Cluster | None):
        raise PlanError(f"cluster must be a Cluster or the path of a cluster file, not {type(cluster).__name__}")
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
