"""Re-tiling with pipeline stages: look at every iteration, and move to other stages when it pays.

What is watched is how long a rank computes, over what its part is predicted to take on machines as they were at first: so times
compare across layouts. Noticing and paying are those of `tatami.retiling.watching`; what could be moved to is the planner's
layout at the speeds of now, of other cuts, replicas, units and micro-batches, and it counts where its predicted time is less
than that of the layout in force by more than the noise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import final

import numpy as np

from tatami.cluster import Cluster, SpeedTable
from tatami.errors import PlanError
from tatami.retiling.alarms import Alarm, Glance, alarm_of, tell_alarm
from tatami.retiling.decision import Decision, DecisionKind, tell_speeds
from tatami.retiling.noticing import Detector, Vector
from tatami.retiling.options import carried_s
from tatami.retiling.ski_rental import Rental
from tatami.retiling.watching import CERTAINTY, CERTAINTY_PROVED, LEAST_GAIN, MOST_KEPT, OneRankPlans, plan_here
from tatami.tiling import AlphaBetaCost, StagedLayout, StagedPlan, with_speeds
from tatami.tiling.speeds import at_paces
from tatami.tiling.staged import plan_stages
from tatami.tiling.staged_price import price_stages
from tatami.units import format_duration
from tatami.workload import Workload

FIXED_S = 0.1
"""What a move costs beside its weights until one was measured: planning, agreement, communicators and modules."""
_LOOK, _LOOK_AT = 32, (4, 8, 16)
"""Iterations between two looks, and after which since a change there are some, as errors shrink."""


@final
class StagedWatcher:
    """Decides after every iteration.

    Args:
        cluster: all processors, as they were measured.
        workload: of the whole network, with its pieces.
        layout: the one in force.
        cost: what the planner chooses by.
        stages: how many there must be; None: as many as is fastest.

    Attributes:
        layout: the one in force.
        works: for each processor with a stage, the seconds that it is predicted to compute.
        alarms: all so far.
        glances: the last few thousand looks.
        move_s: what the last move was predicted to take.
        planned: what plans. Each rank by itself, in no time that counts, unless it is set to something else.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        workload: Workload,
        layout: StagedLayout,
        cost: AlphaBetaCost | None = None,
        stages: int | None = None,
    ) -> None:
        if not workload.pieces:
            raise PlanError("stages are laid out again by the pieces of the network, which this workload does not have")
        self.cluster, self.workload, self.layout = cluster, workload, layout
        self._cost, self._stages = cost or AlphaBetaCost(), stages
        self._names = tuple(cluster.by_name)
        self._detector = Detector((cluster.size,))
        self._paces: dict[str, float] = {}
        self._rental = Rental()
        self._better: StagedPlan | None = None
        self._gain_s = self._price_s = 0.0
        self._fixed_s, self._carried_s = FIXED_S, 0.0
        self.move_s = 0.0
        self._since = 0
        self._is_proved = self._is_due = False
        self._promise: tuple[float, float] | None = None
        self._distrust = 1.0
        self.planned: OneRankPlans = plan_here
        self.alarms: list[Alarm] = []
        self.glances: deque[Glance] = deque(maxlen=MOST_KEPT)
        self.works = self._works()

    def moved(self, took_s: float) -> None:
        """The last move took the slowest rank so long; what it cost beside its weights is the next one's too."""
        self._fixed_s = max(0.0, took_s - self._carried_s)

    def take(self, iteration: int, values: Vector) -> Decision | None:
        """One sample of each processor; None where there is nothing to say.

        Args:
            iteration: the last one, from 1.
            values: seconds that it computed, over those in `works`, in the order of the cluster; 0 where there is none.
        """
        changed = np.flatnonzero(self._detector.step(values))
        fresh = [alarm_of(self._detector, int(index), iteration, processor=self._names[index]) for index in changed]
        self.alarms += fresh
        if fresh:
            self._since, self._is_proved = iteration, True
            self._promise = None  # what the last move brought can no longer be told from what this change took
        since = iteration - self._since
        self._is_due |= bool(fresh) or since in _LOOK_AT or since % _LOOK == 0
        if self._is_due and not self._detector.suspects:
            self._is_due = False
            self._look(iteration)
        if self._better is not None:
            if self._rental.due(self._distrust * self._price_s, rate_s=self._gain_s):
                return self._move(iteration)
            self._rental.lose(self._gain_s)
        if not fresh:
            return None
        told = "; ".join(map(tell_alarm, fresh))
        gain = (
            f"{format_duration(self._gain_s, digits=3)} an iteration could be gained" if self._better else "nothing to gain yet"
        )
        reason = f"iteration {iteration}: {told}: {gain}: {DecisionKind.KEEP.value}"
        ratio = self._ratio()
        return self._decision(iteration, DecisionKind.KEEP, reason, ratio=ratio, predicted=ratio or 1.0)

    def _works(self) -> dict[str, float]:
        priced = price_stages(self.layout, cluster=self.cluster, workload=self.workload, cost=self._cost)
        return {rank.processor: rank.compute_s for rank in priced.ranks}

    def _look(self, iteration: int) -> None:
        """Weigh the planner's layout at the speeds of now against the one in force."""
        placed = [self.cluster.rank_of[name] for name in self.layout.processors]
        levels, errors = self._detector.level, self._detector.error
        if not (np.isfinite(levels[placed]).all() and np.isfinite(errors[placed]).all()):
            return
        for name, rank in zip(self.layout.processors, placed, strict=True):
            self._paces[name] = 1.0 / float(levels[rank])
        now, cost = self._now()
        leader = max(self.layout.processors, key=now.speeds.__getitem__)
        (stay_s, found), _ = self.planned(leader, lambda: self._weighed(now, cost))
        self._settle_promise(stay_s)
        certain = (CERTAINTY_PROVED if self._is_proved else CERTAINTY) * float(errors[placed].max())
        gain_s = stay_s - (stay_s if found is None else found.iteration_s)
        if self._better is not None and gain_s <= 0:
            self._rental.ended(self._price_s)
        self._better = found if gain_s > max(LEAST_GAIN, certain) * stay_s else None
        self._gain_s = gain_s if self._better is not None else 0.0
        self._price_s = self._fixed_s + (self._moving_s(self._better) if self._better is not None else 0.0)
        kinds = {DecisionKind.STAGES: self._rental.loss_s}, {DecisionKind.STAGES: self._price_s}
        speeds = tuple(float(speed) for speed in now.speeds.values())
        self.glances.append(Glance(iteration=iteration, speeds=speeds, loss_s=kinds[0], price_s=kinds[1]))

    def _settle_promise(self, stay_s: float) -> None:
        """Where the last move did not bring half of what it promised, the next must be worth four times its price."""
        if self._promise is not None:
            gain_s, before_s = self._promise
            held = before_s - stay_s >= gain_s / 2
            self._distrust = max(1.0, self._distrust / 2) if held else 4 * self._distrust
            self._promise = None

    def _weighed(self, now: Cluster, cost: AlphaBetaCost) -> tuple[float, StagedPlan | None]:
        stay_s = price_stages(self.layout, cluster=now, workload=self.workload, cost=cost).iteration_s
        return stay_s, plan_stages(now, self.workload, cost=cost, stages=self._stages)

    def _now(self) -> tuple[Cluster, AlphaBetaCost]:
        """The machines at the speeds of now, in flop/s; those that were never measured are as the one in the middle."""
        usual = sorted(self._paces.values())[len(self._paces) // 2]
        paces = {name: self._paces.get(name, usual) for name in self._names}
        scale = self._cost.scale(self.cluster)
        speeds = {
            each.name: each.speed.scaled(size=1.0, speed=scale * paces[each.name])
            if isinstance(each.speed, SpeedTable)
            else each.speed * scale * paces[each.name]
            for each in self.cluster.processors
        }
        relative = {name: pace / usual for name, pace in paces.items()}
        return with_speeds(at_paces(self.cluster, relative), speeds), replace(self._cost, flop_per_s=1.0)

    def _moving_s(self, plan: StagedPlan) -> float:
        """Seconds for weights and optimizer state to get to the ranks that do not have them."""
        edges = (0, *self.layout.cuts, len(self.workload.pieces))
        old = {
            name: (first, stop)
            for first, stop, stage in zip(edges, edges[1:], self.layout.stages, strict=False)
            for name in stage.processors
        }
        parameter_bytes = self.workload.state_bytes_per_parameter - self.workload.element_bytes
        sizes: dict[tuple[str, str], float] = {}
        for rank in plan.ranks:
            first, stop = old.get(rank.processor, (0, 0))
            for number in range(rank.first, rank.stop):
                if not first <= number < stop:
                    source = next(name for name, (low, high) in old.items() if low <= number < high)
                    size = self.workload.pieces[number].parameters * parameter_bytes * rank.units_fraction
                    sizes[source, rank.processor] = sizes.get((source, rank.processor), 0.0) + size
        return carried_s(sizes, cluster=self.cluster)

    def _move(self, iteration: int) -> Decision:
        plan = self._better
        assert plan is not None
        stay_s = plan.iteration_s + self._gain_s
        was, computes_s = self._ratio(), [rank.compute_s for rank in plan.ranks]
        self._rental.moved(self._price_s, rate_s=self._gain_s)
        self.move_s, self._carried_s = self._price_s, self._price_s - self._fixed_s
        ends = (*plan.layout.cuts, len(self.workload.pieces))
        pieces = " + ".join(str(stop - first) for first, stop in zip((0, *plan.layout.cuts), ends, strict=True))
        now = {rank.processor: float(self._now()[0].speeds[rank.processor]) for rank in plan.ranks}
        reason = (
            f"iteration {iteration}: {format_duration(plan.iteration_s, digits=3)} an iteration are expected of other stages, "
            f"and {format_duration(stay_s, digits=3)} of these: {DecisionKind.STAGES.value}; speeds {tell_speeds(now)}; "
            f"{len(plan.layout.stages)} stages of {plan.layout.num_replicas} "
            f"{'replica' if plan.layout.num_replicas == 1 else 'replicas'}, pieces {pieces}"
        )
        self._promise = self._gain_s, stay_s
        self.layout, self._better, self._gain_s = plan.layout, None, 0.0
        self.works = self._works()
        self._detector = self._detector.renewed((len(self._names),))
        self._since, self._is_proved = iteration, False
        predicted = min(computes_s) / max(computes_s)
        return self._decision(iteration, DecisionKind.STAGES, reason, ratio=was, predicted=predicted)

    def _ratio(self) -> float | None:
        """Shortest over longest time that a rank computes; None where one is not known."""
        level = self._detector.level
        times_s = [float(level[self.cluster.rank_of[name]]) * work_s for name, work_s in self.works.items()]
        return min(times_s) / max(times_s) if np.isfinite(times_s).all() else None

    def _decision(self, iteration: int, kind: DecisionKind, reason: str, *, ratio: float | None, predicted: float) -> Decision:
        speeds = {name: float(speed) for name, speed in self._now()[0].speeds.items()} if self._paces else {}
        return Decision(
            kind=kind, iteration=iteration, layout=self.layout, speeds=speeds, ratio=ratio, predicted=predicted, reason=reason
        )
