"""Re-tiling at work: record what every iteration took, ask what to do about it, and move what is said.

The decision is `tatami.retiling`'s, a pure function of all ranks' times, and the same on every rank. A rule that watches every
iteration has the times travel with the sum of the loss that the Trainer makes anyway, as two numbers for each rank; in a loop
written by hand, `step` sums them itself. The rules of DRPM gather their times every R iterations.

Where it has to plan, which takes tens of milliseconds of a core, the fastest rank does, and tells the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tatami.comm.agreement import decided_on_root
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.model.model import TiledModel
from tatami.retiling import Controller, Decision, Retiler, StagedWatcher, Timing, Watcher
from tatami.retiling.link_watch import WatchedMessage
from tatami.retiling.watching import Found
from tatami.runtime.optimizers import check_optimizer
from tatami.runtime.phases import IterationPhase, PhaseTimes
from tatami.runtime.row_messages import Moved
from tatami.state.moving import move
from tatami.tiling import Layout
from tatami.train.own_times import OwnTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One look at the balance, as it is kept for the report.

    Attributes:
        decision: what was decided.
        compute_s: pure compute time of an iteration of every processor with a tile, averaged over the window.
        moved: what the re-mapping moved; None where nothing did.
    """

    decision: Decision
    compute_s: dict[str, float]
    moved: Moved | None

    @property
    def imbalance(self) -> float:
        """Slowest over fastest compute time; 1.0 is perfect."""
        return max(self.compute_s.values()) / max(min(self.compute_s.values()), 1e-12)


def refuse_elastic(comm: AbstractCommunicator, what: str) -> None:
    """
    Raises:
        InputError: the ranks of `comm` may change, which `what` does not follow yet.
    """
    if comm.changes:
        raise InputError(
            f"{what} cannot be used in an elastic run: it does not follow ranks that die or join. Leave it out "
            "(docs/repair.md), or start the script with `tatami run` without --elastic"
        )


def watcher_of(model: TiledModel, retiler: Retiler) -> Watcher | StagedWatcher:
    """Looks at every iteration of a model with or without pipeline stages."""
    if model.stage is None:
        layout, known_speeds = model.layout, model.speeds_known
        return Watcher(retiler, cluster=model.cluster, workload=model.workload, layout=layout, known_speeds=known_speeds)
    assert model.staged is not None
    return StagedWatcher(
        cluster=model.cluster,
        workload=model.staged.workload,
        layout=model.stage.layout,
        cost=model.staged.cost,
        stages=model.staged.stages,
    )


class Retiling:
    """Re-tiles a model while it trains: call `step` after each `optimizer.step()`. The Trainer does.

    Args:
        model: from `tatami.tile`.
        optimizer: its state moves with the weights.
        retiler: when and how to re-tile.

    Raises:
        InputError: the run is elastic: it re-tiles when its ranks change, and only then; or a model with pipeline stages is to
            be re-tiled by another rule than that of `Retiler()`.
    """

    def __init__(self, model: TiledModel, optimizer: torch.optim.Optimizer, *, retiler: Retiler) -> None:
        check_optimizer(optimizer)
        refuse_elastic(model.comm, "Retiling")
        if model.stage is not None and model.shards_optimizer:
            raise InputError(
                "pipeline stages with a sharded optimizer are not re-tiled yet: leave retile out, or give tatami.tile stages=1 "
                "or no sharded_optimizer"
            )
        if model.stage is not None and not retiler.knows_stages:
            raise InputError(
                "stages are laid out again by the least predicted time, which every iteration is looked at for: give Retiler() "
                "without a rule or planner of its own, or tatami.tile stages=1"
            )
        self._model = model
        self._optimizer = optimizer
        self._retiler = retiler
        self._controller: Controller | None = None
        self.watcher: Watcher | StagedWatcher | None = None
        if retiler.watches:
            self.watcher = watcher_of(model, retiler)
            self.watcher.planned = self._planned
        else:
            self._controller = Controller(
                retiler, cluster=model.cluster, workload=model.workload, layout=model.layout, known_speeds=model.speeds_known
            )
        self._times = OwnTimes(model)
        self._totals: list[float] | None = None
        self._window: list[Timing] = []
        self.iteration = 0
        self.checks: list[Check] = []

    def local_report(self) -> list[float]:
        """This rank's part of what `apply_totals` wants the sum of over all ranks: what `OwnTimes.local_report` says.

        Behind it is a number for each message that is watched: the receiver adds when it came, and the sender takes off when it
        left. None where the rule gathers by itself.

        After the backward pass the iteration waits from here on until `apply_totals`: what passes is no compute time.
        """
        if self.watcher is None:
            return []
        if self._model.phases.current is IterationPhase.UPDATE:
            self._model.phases.enter(IterationPhase.GRADIENTS)
        own = self._times.local_report(self.watcher, iteration=self.iteration)
        messages = self.watcher.links.messages if isinstance(self.watcher, Watcher) else ()
        return own + [self._late_s(message) for message in messages]

    def _late_s(self, message: WatchedMessage) -> float:
        rank, times = self._model.comm.rank, self._model.link_times
        if rank == message.source:
            return -times.sent_s.get(message.dest, 0.0)
        return times.arrived_s.get(message.source, 0.0) if rank == message.dest else 0.0

    def apply_totals(self, summed: Sequence[float]) -> None:
        """Take `summed`: what `local_report` gives, summed over all ranks."""
        if self.watcher is not None:
            self._totals = list(summed)
            self._model.link_times.begin()
            if self._model.phases.current is IterationPhase.GRADIENTS:
                self._model.phases.enter(IterationPhase.UPDATE)

    def step(self, *, companions: Mapping[torch.Tensor, torch.Tensor] | None = None) -> Check | None:
        """End the iteration. Collective. Returns the check if one was due.

        A re-tiling drops the gradients, which the optimizer has used, and moves `companions` along (see `move`).
        """
        return self.record(self._model.phases.finish_iteration(), companions=companions)

    def record(self, times: PhaseTimes, *, companions: Mapping[torch.Tensor, torch.Tensor] | None = None) -> Check | None:
        """As `step`, with the times of the iteration."""
        self.iteration += 1
        model = self._model
        if self.watcher is not None:
            return self._watch(self.watcher, companions=companions)
        assert self._controller is not None
        self._window.append(
            Timing(
                processor=model.name,
                iteration=self.iteration,
                t1_s=times.t1_s,
                t2_s=times.t2_s,
                compute_s=times.compute_s,
                work=float(model.local_work),
            )
        )
        del self._window[: -self._retiler.window]
        if not self._retiler.due(self.iteration):
            return None
        gathered = [timing for timings in model.comm.allgather_object(self._window) for timing in timings]
        decision = self._controller.observe(self.iteration, gathered)
        self._window = [] if decision.remaps else self._window
        return self._carry_out(decision, compute_s=_mean_compute_s(gathered), companions=companions)

    def _watch(
        self, watcher: Watcher | StagedWatcher, *, companions: Mapping[torch.Tensor, torch.Tensor] | None
    ) -> Check | None:
        comm = self._model.comm
        if self._totals is None:
            table = torch.tensor(self.local_report(), dtype=torch.float64, device="cpu")
            comm.allreduce(table)
            self.apply_totals(table.tolist())
        assert self._totals is not None
        per_work_s, took_s = self._totals[: comm.size], self._totals[comm.size : 2 * comm.size]
        late_s = self._totals[2 * comm.size :]
        self._totals = None
        if any(took_s):
            watcher.moved(max(took_s))
        works = watcher.works
        if isinstance(watcher, StagedWatcher):
            decision = watcher.take(self.iteration, np.array(per_work_s))
        else:
            decision = watcher.take(self.iteration, np.array(per_work_s), late_s=late_s)
        if decision is None:
            return None
        names = zip(self._model.names, per_work_s, strict=True)
        compute_s = {name: seconds * works[name] for name, seconds in names if seconds > 0 and name in works}
        clock = self._model.phases.clock
        began_s = clock.now_s()
        check = self._carry_out(decision, compute_s=compute_s, companions=companions)
        if decision.remaps:
            self._times.moved(clock.now_s() - began_s)
        return check

    def _planned(self, leader: str, compute: Callable[[], Found]) -> tuple[Found, float]:
        """See `OneRankPlans`: the others, which may have a tenth of a core, wait for what comes."""
        clock = self._model.phases.clock

        def timed() -> tuple[Found, float]:
            began_s = clock.now_s()
            return compute(), clock.now_s() - began_s

        return decided_on_root(self._model.comm, timed, root=self._model.names.index(leader))

    def _carry_out(
        self, decision: Decision, *, compute_s: dict[str, float], companions: Mapping[torch.Tensor, torch.Tensor] | None
    ) -> Check:
        moved = None
        if decision.remaps:
            self._optimizer.zero_grad(set_to_none=True)
            others = companions if isinstance(decision.layout, Layout) else None
            moved = move(self._model, decision.layout, optimizer=self._optimizer, companions=others)
        check = Check(decision=decision, compute_s=compute_s, moved=moved)
        self.checks.append(check)
        if self._model.comm.rank == 0:
            logger.info("%s", decision.reason)
        return check


def _mean_compute_s(timings: list[Timing]) -> dict[str, float]:
    by_processor: dict[str, list[float]] = {}
    for timing in timings:
        if timing.work > 0:
            by_processor.setdefault(timing.processor, []).append(timing.compute_s)
    return {name: sum(values) / len(values) for name, values in by_processor.items()}
