"""Iterations of a layout with pipeline stages on simulated machines: passes and hand-overs one by one, and other stages.

Each rank that hands over goes through its passes in the order of the runtime: as many forward passes as it keeps micro-batches
in flight, and then a backward and a forward pass in turn. Gradients of weights that may be left are computed when it would
wait, and at the end. A pass waits for what the stage before it, or behind it, has sent; a hand-over crosses the links of the
platform, which it shares with all others, while its sender goes on. How long a pass takes is
what the price says of it (`StagedRank.pass_s`), at the speed of the machine at that time, and so are the sums of gradients and
the update: what is simulated is who waits for whom. All ranks begin an iteration together, as after the sum of the loss.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import final

import numpy as np

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.retiling import Decision, StagedWatcher
from tatami.sim.platforms import AbstractPlatform
from tatami.sim.stage import Stage, play
from tatami.sim.tiling.changes import Change, Speeds
from tatami.sim.tiling.run import TilingRun
from tatami.tiling import AlphaBetaCost, StagedLayout, StagedPlan
from tatami.tiling.pipeline_flow import BACKWARD
from tatami.tiling.staged_price import StagedRank, price_stages
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StagedJob:
    """What `rehearse_stages` runs: processor r of the cluster on host r of the platform.

    Attributes:
        platform: links; the speeds of its hosts are not looked at.
        cluster: the processors, at the speeds that the run is planned with.
        workload: what is laid out, with its pieces.
        layout: how.
        iterations: how many.
        changes: of speeds, against those that the run begins with.
        retiles: whether other stages are moved to when that pays.
        stages: how many there must be then; None: as many as is fastest.
        cost: what layouts are priced by.

    Raises:
        PlanError: no iteration; a processor that is not there.
    """

    platform: AbstractPlatform
    cluster: Cluster
    workload: Workload
    layout: StagedLayout
    iterations: int = 1
    changes: tuple[Change, ...] = ()
    retiles: bool = False
    stages: int | None = None
    cost: AlphaBetaCost | None = None

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise PlanError(f"a run has at least 1 iteration, not {self.iterations}")
        unknown = {each.processor for each in self.changes} - set(self.cluster.by_name)
        if unknown:
            raise PlanError(f"the speeds of {', '.join(sorted(unknown))} change, and there is no such processor")


@dataclass(frozen=True, kw_only=True)
class StagedIteration:
    """One simulated iteration, in seconds.

    Attributes:
        took_s: until the last rank has updated its weights.
        compute_s: of each rank, in its passes and its update.
        slower: how many times as long that is as it was planned.
        bytes_moved: by hand-overs.
    """

    took_s: float
    compute_s: Mapping[str, float]
    slower: Mapping[str, float]
    bytes_moved: float


def simulate_iteration(
    plan: StagedPlan, *, cluster: Cluster, platform: AbstractPlatform, speeds: Speeds | None = None, begins_s: float = 0.0
) -> StagedIteration:
    """One iteration of a plan.

    Args:
        plan: its ranks say how long everything takes, `in_flight` in which order.
        cluster: rank r is its processor r, on host r of the platform.
        platform: the links.
        speeds: of each processor, 1 where it computes as the plan says; None: all do.
        begins_s: when, by the clock of `speeds`.
    """
    now = speeds or Speeds(dict.fromkeys(cluster.by_name, 1.0), changes=())

    def act(stage: Stage) -> Callable[[], StagedIteration]:
        iteration = _Iteration(stage, plan, cluster=cluster, speeds=now, begins_s=begins_s)
        iteration.begin()
        return lambda: iteration.result

    return play(platform, act)


@dataclass(eq=False, kw_only=True)
class _Rank:
    """The ranks of one stage and replica, in the midst of an iteration.

    Attributes:
        facts: what the price says of the first of them, which hands over.
        members: all of them, which compute each pass together.
        host: the number of the first on the platform.
        passes: what it does: for which micro-batch, and whether that is its backward pass.
        most_left: of so many micro-batches gradients of weights may be left.
        came: of which passes what they wait for is there.
        at: the pass that is next.
    """

    facts: StagedRank
    members: tuple[str, ...]
    host: int
    passes: list[tuple[int, bool]]
    most_left: int
    came: set[tuple[int, bool]] = field(default_factory=set)
    at: int = 0
    left: int = 0
    is_busy: bool = False


_PRODUCTS = 4
"""Gradients of weights that a stage computes one by one in a micro-batch; it looks for what it waits for in between."""


@final
class _Iteration:
    def __init__(self, stage: Stage, plan: StagedPlan, *, cluster: Cluster, speeds: Speeds, begins_s: float) -> None:
        self._stage, self._plan, self._speeds, self._begins_s = stage, plan, speeds, begins_s
        self._last = len(plan.layout.stages) - 1
        self._step_s = {each.name: each.step_s for each in cluster.processors}
        by_name = {each.processor: each for each in plan.ranks}
        self._ranks = {
            (number, replica): _Rank(
                facts=by_name[own.processors[0]],
                members=own.processors,
                host=cluster.rank_of[own.processors[0]],
                passes=_passes(by_name[own.processors[0]].micro_batches, plan.in_flight[number]),
                most_left=plan.weights_left[number],
            )
            for number, layout in enumerate(plan.layout.stages)
            for replica, own in enumerate(layout.replicas)
        }
        self._left = [len(layout.replicas) for layout in plan.layout.stages]
        self._group_of = _tied(plan)
        self._planned_s, self._computed_s = (dict.fromkeys(plan.layout.processors, 0.0) for _ in range(2))
        self._queues: defaultdict[tuple[int, int], deque[Callable[[], object]]] = defaultdict(deque)
        self._ended_s = 0.0

    @property
    def result(self) -> StagedIteration:
        return StagedIteration(
            took_s=self._ended_s,
            compute_s=self._computed_s,
            slower={name: own_s / self._planned_s[name] for name, own_s in self._computed_s.items() if own_s},
            bytes_moved=self._stage.bytes_moved,
        )

    def begin(self) -> None:
        for rank in self._ranks.values():
            self._go_on(rank)

    def _go_on(self, rank: _Rank) -> None:
        """Begin the next pass, if what it waits for is there."""
        if rank.is_busy or rank.at == len(rank.passes):
            return
        number, is_backward = rank.passes[rank.at]
        stage = rank.facts.stage
        waits = stage < self._last if is_backward else stage > 0
        if waits and (number, is_backward) not in rank.came:
            if rank.left:
                self._weights(rank, lambda: self._go_on(rank))
            return
        rank.is_busy = True
        forward_s = (1 - BACKWARD) * (rank.facts.pass_s - rank.facts.again_s)
        if not is_backward:
            self._compute(rank, forward_s, lambda: self._forward_done(rank, number))
        else:
            early_s = rank.facts.pass_s - forward_s - rank.facts.late_s
            self._compute(rank, early_s, lambda: self._gradient_known(rank, number))

    def _forward_done(self, rank: _Rank, number: int) -> None:
        if rank.facts.stage < self._last:
            self._hand_over(rank, rank.facts.stage + 1, number, is_backward=False)
        self._pass_done(rank)

    def _gradient_known(self, rank: _Rank, number: int) -> None:
        """The gradient of its input leaves before those of its weights are computed."""
        if rank.facts.stage:
            self._hand_over(rank, rank.facts.stage - 1, number, is_backward=True)
        rank.left += _PRODUCTS
        is_first = rank.passes[rank.at][0] == 0
        self._work_off(rank, 0 if is_first else _PRODUCTS * rank.most_left, lambda: self._pass_done(rank))

    def _work_off(self, rank: _Rank, left: int, then: Callable[[], None]) -> None:
        """Compute gradients of weights until so many products are left."""
        if rank.left <= left:
            then()
        else:
            self._weights(rank, lambda: self._work_off(rank, left, then))

    def _weights(self, rank: _Rank, then: Callable[[], None]) -> None:
        rank.is_busy = True
        rank.left -= 1

        def done() -> None:
            rank.is_busy = False
            then()

        self._compute(rank, rank.facts.late_s / _PRODUCTS, done)

    def _pass_done(self, rank: _Rank) -> None:
        rank.is_busy = False
        rank.at += 1
        if rank.at == len(rank.passes):
            self._work_off(rank, 0, lambda: self._all_done(rank))
        else:
            self._go_on(rank)

    def _all_done(self, rank: _Rank) -> None:
        self._left[rank.facts.stage] -= 1
        self._sum(rank.facts.stage)

    def _hand_over(self, rank: _Rank, to: int, number: int, *, is_backward: bool) -> None:
        other = self._ranks[to, rank.facts.replica]
        piece = self._plan.workload.pieces[max(rank.facts, other.facts, key=lambda each: each.stage).first]
        size_bytes = piece.crossing_bytes_per_sample * rank.facts.samples / rank.facts.micro_batches

        def arrived() -> None:
            queue.popleft()
            if queue:
                queue[0]()
            other.came.add((number, is_backward))
            self._go_on(other)

        # Between two ranks there is one connection, on which hand-overs travel one after another.
        queue = self._queues[rank.host, other.host]
        queue.append(lambda: self._stage.send(rank.host, other.host, size_bytes=size_bytes, then=arrived))
        if len(queue) == 1:
            queue[0]()

    def _sum(self, stage: int) -> None:
        """The sums of gradients begin when all replicas of a stage, and all stages with the same weights, are done."""
        together = [each for each in range(self._last + 1) if self._group_of[each] == self._group_of[stage]]
        if any(self._left[each] for each in together):
            return
        for rank in self._ranks.values():
            if rank.facts.stage in together:
                self._stage.after(rank.facts.gradients_s, lambda rank=rank: self._update(rank))  # type: ignore[misc]

    def _update(self, rank: _Rank) -> None:
        self._compute(rank, max(self._step_s[name] for name in rank.members), self._end)

    def _end(self) -> None:
        self._ended_s = self._stage.now_s

    def _compute(self, rank: _Rank, work_s: float, then: Callable[[], None]) -> None:
        """The slowest of the ranks that compute together counts."""
        begin_s, longest_s = self._begins_s + self._stage.now_s, 0.0
        for name in rank.members:
            spent_s = self._speeds.finish_s(name, work_flop=work_s, begin_s=begin_s) - begin_s
            self._planned_s[name] += work_s
            self._computed_s[name] += spent_s
            longest_s = max(longest_s, spent_s)
        self._stage.after(longest_s, then)


def _passes(micro_batches: int, in_flight: int) -> list[tuple[int, bool]]:
    ahead = min(in_flight, micro_batches)
    passes = [(number, False) for number in range(ahead)]
    for number in range(micro_batches):
        passes.append((number, True))
        if ahead + number < micro_batches:
            passes.append((ahead + number, False))
    return passes


def _tied(plan: StagedPlan) -> list[int]:
    """For each stage the first one with which it shares a weight, directly or by others."""
    edges = (0, *plan.layout.cuts, len(plan.workload.pieces))
    names = [
        {name for piece in plan.workload.pieces[first:stop] for name, _ in piece.shared} for first, stop in pairwise(edges)
    ]
    group = list(range(len(names)))
    for one, own in enumerate(names):
        for other in range(one):
            if own & names[other]:
                low, high = sorted((group[one], group[other]))
                group = [low if each == high else each for each in group]
    return group


def rehearse_stages(job: StagedJob) -> TilingRun:
    """Simulate a run with pipeline stages."""
    speeds = Speeds(dict.fromkeys(job.cluster.by_name, 1.0), changes=job.changes)
    price = partial(price_stages, cluster=job.cluster, workload=job.workload, cost=job.cost)
    plan, watcher = price(job.layout), None
    if job.retiles:
        watcher = StagedWatcher(cluster=job.cluster, workload=job.workload, layout=job.layout, cost=job.cost, stages=job.stages)
    now_s = moved_bytes = 0.0
    iteration_s, compute_s, move_s = [], [], []
    decisions: list[Decision] = []
    known: StagedIteration | None = None
    num_simulated = 0
    for number in range(1, job.iterations + 1):
        if speeds.next_iteration <= number:
            known = None
        speeds.begin(number)
        if known is None or speeds.next_s(now_s - known.took_s) < now_s + known.took_s:
            known = simulate_iteration(plan, cluster=job.cluster, platform=job.platform, speeds=speeds, begins_s=now_s)
            num_simulated += 1
        now_s += known.took_s
        moved_bytes += known.bytes_moved
        iteration_s.append(known.took_s)
        compute_s.append((max(known.compute_s.values()), min(known.compute_s.values())))
        if watcher is None:
            continue
        decision = watcher.take(number, np.array([known.slower.get(name, 0.0) for name in job.cluster.by_name]))
        if decision is None:
            continue
        decisions.append(decision)
        move_s.append(watcher.move_s if decision.remaps else 0.0)
        if decision.remaps:
            now_s += move_s[-1]
            plan, known = price(watcher.layout), None
            watcher.moved(move_s[-1])
    return TilingRun(
        total_s=now_s,
        iteration_s=tuple(iteration_s),
        compute_s=tuple(compute_s),
        decisions=tuple(decisions),
        move_s=tuple(move_s),
        tilings=(),
        bytes_moved=moved_bytes,
        num_simulated=num_simulated,
        alarms=() if watcher is None else tuple(watcher.alarms),
        glances=() if watcher is None else tuple(watcher.glances),
    )
