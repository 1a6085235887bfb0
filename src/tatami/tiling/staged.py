"""Pipeline stages for a whole cluster: how many replicas and stages, on which machines, in how many micro-batches.

R replicas of S stages are laid out on groups of R machines. A group computes one stage, one replica on each of its machines:
fast machines with fast ones, and machines of one host together where that can be, because the group sums the gradients of its
stage. For a pipeline the group is one machine, as fast as the slowest of its machines is for its share of the samples;
`best_pipeline` orders the groups and cuts the network. Numbers of replicas and of micro-batches are tried, and the best
pipelines that were found are priced as `price_stages` has it. The same is tried with several ranks of a host as one machine,
which share the units of a stage (`tatami.tiling.staged_hosts`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster
from tatami.errors import MemoryLackError, PlanError, warn
from tatami.progress import reported
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.compute import scatter
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.links import SlowestLink
from tatami.tiling.pipeline import PipelineStage, PipelineTask, best_pipeline
from tatami.tiling.pipeline_flow import Floats
from tatami.tiling.plan import Plan, plan, uncollected
from tatami.tiling.room import WORTH_IT
from tatami.tiling.sharding import num_rounds
from tatami.tiling.span import whole_shares
from tatami.tiling.staged_hosts import shared_hosts
from tatami.tiling.staged_layout import StagedLayout
from tatami.tiling.staged_price import PASS_MESSAGES, StagedPlan, pass_speed, price_stages, recomputable
from tatami.workload import Workload, as_probed

LEAST_GAIN = 0.03
"""Stages are chosen where they are predicted to be faster by this fraction of an iteration, and so are more stages on
more machines: each can be late or fail, and predictions are not better than that."""
_WORSE = 2
"""Numbers of micro-batches in a row that may be slower before no smaller ones are tried: other machines may suit them."""
_FULL = 4
"""Micro-batches for each stage that keep a pipeline busy for four fifths of the time."""
_PRICED = 3
_MOST_GROUPS = 256
"""The fastest groups are looked at: there are no more stages than that."""
_SMALL = 6
"""Machines, with which everything is tried thoroughly."""
_EACH, _GROWTH = 4, 1.5
"""Each number of replicas up to this one is tried; then from one to the next."""
_ROUNDING = 1e-9

Indices = NDArray[np.int64]


def choose(flat: Plan | None, staged: StagedPlan | None) -> Plan | StagedPlan | None:
    """Which of two plans to run: stages where nothing else fits, and where they are predicted to be `LEAST_GAIN` faster.

    Relative speeds do not say how long computing takes in comparison with sending, so with them stages are the last resort.
    """
    if flat is None or staged is None:
        return staged if flat is None else flat
    is_faster = staged.iteration_s * (1 + LEAST_GAIN) <= flat.predicted_s
    return staged if staged.is_measured and is_faster else flat


def fastest_plan(
    planner: str,
    *,
    cluster: Cluster,
    workload: Workload,
    cost: AbstractCost | None = None,
    stages: int | None = None,
    idle: bool = False,
) -> Plan | StagedPlan:
    """The fastest layout, with or without stages where the workload knows its pieces; with as many as were asked for.

    Args:
        planner: of layouts without stages.
        cluster, workload, cost, idle: as of `tatami.tiling.plan`.
        stages: how many there are to be; None: as many as is fastest.

    Raises:
        PlanError: nothing fits.
    """
    priced = cost if isinstance(cost, AlphaBetaCost) else None
    staged = None
    if workload.pieces and (cost is None or priced is not None):
        staged = plan_stages(cluster, workload, stages=stages, cost=priced)
    if stages is not None and stages > 1:
        if staged is None:
            raise PlanError(f"{stages} stages do not fit: no machines have the memory for them. Take more stages or machines")
        return staged
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            flat = plan(planner, cluster=cluster, workload=replace(workload, pieces=()), cost=cost, idle=idle)
        except MemoryLackError:
            if staged is None:
                raise
            return staged
    chosen = choose(flat, staged)
    assert chosen is not None
    if chosen is flat:
        for each in warned:
            warn(str(each.message))
    return chosen


@uncollected()
def plan_stages(
    cluster: Cluster,
    workload: Workload,
    *,
    stages: int | None = None,
    micro_batches: int | None = None,
    cost: AlphaBetaCost | None = None,
) -> StagedPlan | None:
    """The fastest layout of at least two stages that is found; every rank gets the same answer from the same arguments.

    Of few machines, fewer make fewer stages where that is slower by no more than `LEAST_GAIN`.

    Stages recompute activations (`Workload.recompute`) where memory allows none otherwise, or where that takes clearly less
    time than more micro-batches and other stages.

    Args:
        cluster: the machines; some may have no place in the layout.
        workload: what is laid out.
        stages: how many there must be; None: as many as is fastest, two at least.
        micro_batches: of every replica; None: as many as is fastest.
        cost: says how fast a processor of speed 1 is; `AlphaBetaCost()` where None.

    Returns:
        None where the workload's pieces are not known, where there is a single piece or machine, and where memory allows none.

    Raises:
        PlanError: fewer than two stages, or more than there are pieces or machines; more micro-batches than samples, or more
            than one with statistics of the whole batch.
    """
    workload = as_probed(workload, cluster)
    if micro_batches is None:
        micro_batches = workload.micro_batches
    pieces = len(workload.pieces)
    if pieces:
        _check(stages, micro_batches, cluster=cluster, workload=workload)
    if min(pieces, cluster.size) < 2:
        return None
    cost = cost or AlphaBetaCost()
    search = _Search(cluster, workload, cost, stages, micro_batches)

    def fastest(*, recomputes: bool) -> StagedPlan | None:
        layouts = _Search(cluster, workload, cost, stages, micro_batches, recomputes=recomputes).layouts()
        for shared in shared_hosts(cluster, workload, cost=cost):
            if min(len(shared.workload.pieces), shared.cluster.size) >= (stages or 2):
                own = _Search(shared.cluster, shared.workload, cost, stages, micro_batches, recomputes=recomputes)
                layouts = chain(layouts, map(shared.layout, own.layouts()))
        found: StagedPlan | None = None
        for layout in layouts:
            for priced in search.recomputing(layout) if recomputes else (search.priced(layout),):
                if priced.fits and (found is None or priced.iteration_s < found.iteration_s):
                    found = priced
        return found

    best = None if workload.recompute else fastest(recomputes=False)
    if workload.recompute or (workload.may_recompute and search.is_short_of_memory):
        again = fastest(recomputes=True)
        if best is None or (again is not None and again.iteration_s < (1 - WORTH_IT) * best.iteration_s):
            best = again
    if best is None:
        return None
    for fewer in range(2, len(best.layout.stages) if stages is None and cluster.size <= _SMALL else 2):
        small = plan_stages(cluster, workload, stages=fewer, micro_batches=micro_batches, cost=cost)
        spares = small is not None and len(small.layout.processors) < len(best.layout.processors)
        if small is not None and spares and small.iteration_s <= best.iteration_s * (1 + LEAST_GAIN):
            return small
    return search.first_rank_last(best)


def _check(stages: int | None, micro_batches: int | None, *, cluster: Cluster, workload: Workload) -> None:
    if stages is not None and stages < 2:
        raise PlanError(f"a pipeline has at least 2 stages, not {stages}")
    for most, what in ((len(workload.pieces), "pieces of this network"), (cluster.size, "machines")):
        if stages is not None and stages > most:
            raise PlanError(f"{stages} stages are more than the {most} {what}: take at most {most}")
    if micro_batches is not None and micro_batches < 1:
        raise PlanError(f"there must be at least 1 micro-batch, not {micro_batches}")
    if micro_batches is not None and micro_batches > workload.samples:
        raise PlanError(
            f"{micro_batches} micro-batches are more than the {workload.samples} samples: take at most {workload.samples}"
        )
    if (micro_batches or 1) > workload.most_micro_batches:
        raise PlanError(
            f"this network cannot be computed in {micro_batches} micro-batches: batch normalization takes statistics of the "
            "whole batch. Take one micro-batch, or other layers"
        )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A pipeline of groups, before it is priced."""

    time_s: float
    groups: Indices
    micro_batches: int
    sizes: tuple[int, ...]
    stages: tuple[PipelineStage, ...]


class _Search:
    """The machines as arrays, in the order of the ranks."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        cost: AlphaBetaCost,
        stages: int | None,
        micro_batches: int | None,
        *,
        recomputes: bool = False,
    ) -> None:
        self.cluster, self.workload, self.cost = cluster, workload, cost
        self.stages, self.micro_batches = stages, micro_batches
        own = cluster.processors
        self.names = [each.name for each in own]
        self.speeds = np.array([float(each.speed) for each in own]) * cost.scale(cluster)
        self.noise = 1 + scatter(own)
        self.memory = np.array([math.inf if each.memory_bytes is None else each.memory_bytes for each in own], dtype=float)
        self.messages, self.copies, self.calls = (
            np.array([getattr(each, name) for each in own]) for name in ("message_s", "copy_bytes_per_s", "call_s")
        )
        self.flop, self.late, self.state, self.activations, self.crossing, self.gradients, self.updates = (
            np.array(values, dtype=float)
            for values in zip(
                *(
                    (
                        piece.flop_per_sample,
                        piece.late_flop_per_sample,
                        piece.parameters * workload.state_bytes_per_parameter + piece.frozen_bytes,
                        piece.activation_bytes_per_sample,
                        piece.crossing_bytes_per_sample,
                        piece.parameters * workload.wire_bytes,
                        piece.largest * workload.update_bytes_per_parameter,
                    )
                    for piece in workload.pieces
                ),
                strict=True,
            )
        )

        self.largest_bytes = 0.0
        if recomputes:
            self._recompute()

    def _recompute(self) -> None:
        """Search as if every layer were recomputed, wherever it is cut: its pieces keep parts of its input."""
        self.late = np.zeros_like(self.late)
        for place, piece in enumerate(self.workload.pieces):
            for layer in piece.layers:
                own = slice(place, place + layer.pieces)
                kept, flop = self.activations[own], self.flop[own]
                dropped = max(0.0, layer.kept_bytes - layer.input_bytes)
                self.activations[own] = np.maximum(0.0, kept - dropped * kept / max(kept.sum(), 1.0))
                self.flop[own] = flop + layer.flop * flop / max(flop.sum(), 1.0)
                self.largest_bytes = max(self.largest_bytes, layer.kept_bytes)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether some machine could not keep all of the network, with its gradients on their way and all samples."""
        gradients = self.gradients.sum() / self.workload.wire_bytes * max(self.workload.element_bytes, 4)
        whole = self.state.sum() + 3 * gradients + self.workload.samples * self.activations.sum()
        return bool((self.memory < whole + self.workload.most_update_bytes).any())

    def recomputing(self, layout: StagedLayout) -> Iterator[StagedPlan]:
        """The layout, and that whose cuts are between layers: all stages recompute, or those that lack memory otherwise."""
        between = {0, *range(len(self.workload.pieces))}
        for place, piece in enumerate(self.workload.pieces):
            for layer in piece.layers:
                between -= set(range(place + 1, place + layer.pieces))
        nearest = tuple(min(between, key=lambda at: abs(at - cut)) for cut in layout.cuts)
        # Other cuts may leave a stage without the layer whose units its ranks share.
        shares = any(len(replica.processors) > 1 for stage in layout.stages for replica in stage.replicas)
        moved = not shares and nearest[0] > 0 and len(set(nearest)) == len(nearest)
        several = [layout.cuts, *([nearest] if moved else [])]
        for cuts in dict.fromkeys(several):
            cut = StagedLayout(stages=layout.stages, cuts=cuts)
            chosen = set(recomputable(cut, self.workload))
            if not chosen:
                continue
            plan = self.priced(cut.recomputing(chosen))
            times_s = {rank.stage: rank.pass_s for rank in plan.ranks}
            for stage in sorted(chosen, key=lambda stage: -times_s[stage]) if not self.workload.recompute else ():
                other = self.priced(cut.recomputing(chosen - {stage}))
                if other.fits and other.iteration_s <= plan.iteration_s:
                    chosen, plan = chosen - {stage}, other
            yield plan

    def priced(self, layout: StagedLayout) -> StagedPlan:
        return price_stages(layout, cluster=self.cluster, workload=self.workload, cost=self.cost)

    def layouts(self) -> Iterator[StagedLayout]:
        """The most promising ones."""
        numbers_tried = reported(self._numbers_of_replicas(), "planning pipeline stages", unit="numbers of replicas")
        found = [each for replicas in numbers_tried for each in self._of_replicas(replicas)]
        found.sort(key=lambda each: each.time_s)
        for place, each in enumerate(found[:_PRICED]):
            number, most = each.micro_batches, self._enough(each.groups.shape[1])
            others = (2 * number, 3 * number // 2, 3 * number // 4) if self.cluster.size <= _SMALL else (2 * number,)
            numbers = {number, *(own for own in others if 1 <= own <= most and not (place or self.micro_batches))}
            better = [self._solved(each.groups, number, thorough=True) for number in sorted(numbers)]
            yield from (self._layout(one) for one in (*better, each) if one is not None)
        if not found:
            # Memory is scarce: perhaps the tables over all sets of machines find what fits.
            for replicas in self._numbers_of_replicas():
                for groups in self._groupings(replicas):
                    one = self._solved(groups, self._most_micro_batches(replicas), thorough=True)
                    yield from (self._layout(one),) if one is not None else ()

    def _numbers_of_replicas(self) -> Iterator[int]:
        most = min(self.cluster.size // (self.stages or 2), self.workload.samples // (self.micro_batches or 1))
        number = 1
        while number <= most:
            yield number
            number = max(number + 1, round(number * _GROWTH) if number > _EACH else 0)

    def _most_micro_batches(self, replicas: int) -> int:
        return self.micro_batches or min(self.workload.most_micro_batches, self.workload.samples // replicas)

    def _enough(self, replicas: int) -> int:
        """More micro-batches are taken where memory asks for them: relative speeds do not say what a pass costs by itself."""
        most = self._most_micro_batches(replicas)
        if self.micro_batches or self.cost.compares_machines(self.cluster):
            return most
        return min(most, _FULL * (self.stages or self.cluster.size // replicas))

    def _of_replicas(self, replicas: int) -> Iterator[_Found]:
        """For each grouping the best number of micro-batches, found by walking along powers of two from the largest."""
        most = self._most_micro_batches(replicas)
        numbers = sorted({most} if self.micro_batches else {most, *(1 << power for power in range(most.bit_length()))})
        enough = self._enough(replicas)
        order = [*reversed([each for each in numbers if each <= enough]), *(each for each in numbers if each > enough)]
        for groups in self._groupings(replicas):
            best: _Found | None = None
            worse = 0
            # More micro-batches fill a pipeline better and need less memory, until what a pass costs by itself outweighs that.
            # So the walk begins with many, and ends when `_WORSE` fewer in a row were slower; beyond `enough` it only looks for
            # what fits at all.
            for number in order:
                if number > enough and best is not None:
                    break
                found = self._solved(groups, number, thorough=self.cluster.size <= _SMALL)
                if found is not None and (best is None or found.time_s < best.time_s):
                    best, worse = found, 0
                elif best is not None:
                    worse += 1
                    if worse == _WORSE:
                        break
            if best is not None:
                yield best

    def _groupings(self, replicas: int) -> Iterator[Indices]:
        """Groups of machines for a stage, (groups, replicas), the fastest first: by speed, and hosts together."""
        by_speed = sorted(range(self.cluster.size), key=lambda index: -self.speeds[index])
        together: dict[str, list[int]] = {}
        for index in by_speed:
            together.setdefault(self.cluster.processors[index].host, []).append(index)
        whole = [index for own in together.values() for index in own[: len(own) // replicas * replicas]]
        taken = set(whole)
        orders = {tuple(by_speed), (*whole, *(index for index in by_speed if index not in taken))}
        for order in sorted(orders):
            groups = np.array(order[: len(order) // replicas * replicas]).reshape(-1, replicas)
            slowest = self.speeds[groups].min(axis=1)
            yield groups[np.argsort(-slowest, kind="stable")][:_MOST_GROUPS]

    def _solved(self, groups: Indices, micro_batches: int, *, thorough: bool) -> _Found | None:
        """The best pipeline of the groups, with shares of the samples that suit it."""
        fewest, most = self.stages or 2, self.stages
        weights, speeds = np.ones(groups.shape[1]), self.speeds
        best: _Found | None = None
        for _ in range(2 if self.cluster.sized or (thorough and groups.shape[1] > 1) else 1):
            sizes = whole_shares(weights.tolist(), total=self.workload.samples)
            if min(sizes) < micro_batches:
                break
            task = self._task(groups, sizes, micro_batches, speeds)
            stages = best_pipeline(task, fewest=fewest, most=most, thorough=thorough)
            if stages is None:
                break
            found = _Found(time_s=task.time_s(stages), groups=groups, micro_batches=micro_batches, sizes=sizes, stages=stages)
            best = found if best is None or found.time_s < best.time_s or self.cluster.sized else best
            # Again, at the speeds of stages of this size, with shares of the samples in proportion to what replicas compute.
            flop = [self.flop[stage.first : stage.stop].sum() for stage in stages]
            if self.cluster.sized:
                samples = self.workload.samples / (groups.shape[1] * micro_batches)
                each = [pass_speed(one.speed, samples, workload=self.workload) for one in self.cluster.processors]
                speeds = np.array(each) * self.cost.scale(self.cluster)
            times = np.array(flop)[:, None] / speeds[groups[[stage.machine for stage in stages]]]
            weights = 1 / times.max(axis=0)
        return best

    def _task(self, groups: Indices, sizes: Sequence[int], micro_batches: int, speeds: Floats) -> PipelineTask:
        workload, replicas = self.workload, groups.shape[1]
        samples = np.array(sizes) / micro_batches
        flop_s = self.noise * (samples / speeds[groups]).max(axis=1)
        calls_s = self.calls[groups].max(axis=1) * len(workload.blocks) / len(workload.pieces)
        bandwidth, latency = self._links(groups, samples / samples.mean())
        state, sum_s, members = self.state, None, 2 * replicas
        if replicas > 1:
            part = 1.0 if replicas == 2 else 2 * (replicas - 1) / replicas
            rates = [
                self._slowest.among([self.names[each] for each in group.tolist()]).bandwidth_bytes_per_s for group in groups
            ]
            sum_s = part / np.array(rates)
            elements = self.gradients / workload.wire_bytes
            element_bytes = max(workload.element_bytes, 4)
            if workload.sharded_bytes_per_parameter:
                # About an equal share of the optimizer's state, and the messages of two rounds.
                rounds = num_rounds(float(elements.sum()) * element_bytes / (self.stages or 2))
                state = state - elements * workload.sharded_bytes_per_parameter * (1 - 1 / replicas)
                state = state + elements * (4 * element_bytes / rounds)
            else:
                # What is summed is in memory once more, and so is what comes from others.
                state = state + elements * (3 * element_bytes)
        shared: dict[tuple[str, int], list[int]] = {}
        for index, piece in enumerate(workload.pieces):
            for own in piece.shared:
                shared.setdefault(own, []).append(index)
        swapped = workload.wire_bytes * (1.0 if members == 2 else 2 * (members - 1) / members)
        return PipelineTask(
            work_s=flop_s[:, None] * self.flop + calls_s[:, None],
            step_s=flop_s * workload.sample_flop + PASS_MESSAGES * self.messages[groups].max(axis=1),
            message_s=self.messages[groups].max(axis=1),
            crossing_bytes=self.crossing * samples.mean(),
            bandwidth_bytes_per_s=bandwidth,
            latency_s=latency,
            state_bytes=state,
            activation_bytes=self.activations * math.ceil(samples.max()),
            update_bytes=self.updates,
            memory_bytes=self.memory[groups].min(axis=1) - self.largest_bytes * math.ceil(samples.max()),
            micro_batches=micro_batches,
            sum_s=sum_s,
            gradient_bytes=self.gradients,
            late_s=flop_s[:, None] * self.late,
            tied=tuple((readers[0], readers[-1], swapped * elements) for (_, elements), readers in shared.items()),
        )

    @cached_property
    def _slowest(self) -> SlowestLink:
        return SlowestLink(self.cluster)

    @cached_property
    def _hosts(self) -> tuple[Indices, Floats, Floats, Indices, Floats, Floats]:
        """The host of each processor, the links of hosts to others, and exceptions by the number of the pair of hosts."""
        hosts = {host: index for index, host in enumerate(dict.fromkeys(self.cluster.host_of.values()))}
        own = [self.cluster.link_of(host) for host in hosts]
        exceptions = sorted(
            (key, link.bandwidth_bytes_per_s, link.latency_s)
            for (one, other), link in self.cluster.links.items()
            if one in hosts and other in hosts
            for key in {hosts[one] * len(hosts) + hosts[other], hosts[other] * len(hosts) + hosts[one]}
        )
        return (
            np.array([hosts[each.host] for each in self.cluster.processors]),
            np.array([link.bandwidth_bytes_per_s for link in own]),
            np.array([link.latency_s for link in own]),
            np.array([key for key, _, _ in exceptions], dtype=np.int64),
            np.array([bandwidth for _, bandwidth, _ in exceptions]),
            np.array([latency for _, _, latency in exceptions]),
        )

    def _links(self, groups: Indices, shares: Floats) -> tuple[Floats, Floats]:
        """Between every two groups: at the pace of the replica that takes longest."""
        host_of, bandwidths, latencies, keys, between, delays = self._hosts
        slowest, longest = np.full((len(groups),) * 2, np.inf), np.zeros((len(groups),) * 2)
        for members, share in zip(groups.T, shares, strict=True):
            host, copies = host_of[members], self.copies[members]
            same = host[:, None] == host[None, :]
            rate = np.where(
                same, self.cluster.local.bandwidth_bytes_per_s, np.minimum.outer(bandwidths[host], bandwidths[host])
            )
            delay = np.where(same, self.cluster.local.latency_s, np.maximum.outer(latencies[host], latencies[host]))
            if len(keys):
                asked = host[:, None] * len(bandwidths) + host[None, :]
                at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
                rate, delay = np.where(keys[at] == asked, between[at], rate), np.where(keys[at] == asked, delays[at], delay)
            rate = np.minimum(rate, np.minimum.outer(copies, copies))
            slowest, longest = np.minimum(slowest, rate / share), np.maximum(longest, delay)
        return slowest, longest

    def _layout(self, found: _Found) -> StagedLayout:
        widths = [size / self.workload.samples for size in found.sizes]
        layouts = [
            Layout(
                replicas=tuple(
                    Replica(width=width, processors=(self.names[index],), heights=(1.0,), micro_batches=found.micro_batches)
                    for width, index in zip(widths, found.groups[stage.machine].tolist(), strict=True)
                )
            )
            for stage in found.stages
        ]
        return StagedLayout(stages=tuple(layouts), cuts=tuple(stage.first for stage in found.stages[1:]))

    def first_rank_last(self, plan: StagedPlan) -> StagedPlan:
        """The same with rank 0 in the last stage, which has the loss, where that costs nothing."""
        first, stages = self.names[0], [stage.processors for stage in plan.layout.stages]
        if first in stages[-1]:
            return plan
        speeds = self.cluster.speeds
        exchanges = [{first: name, name: first} for name in stages[-1] if speeds[name] == speeds[first]][:_PRICED]
        for own in stages:
            if first in own and len(own) == len(stages[-1]):
                pairs = list(zip(own, stages[-1], strict=True))
                exchanges.append(dict(pairs + [(other, one) for one, other in pairs]))
        for exchanged in exchanges:
            other = self.priced(plan.layout.renamed(exchanged))
            if other.fits and other.iteration_s <= plan.iteration_s * (1 + _ROUNDING):
                return other
        return plan
