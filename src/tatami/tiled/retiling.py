"""Re-tiling at work: record what every iteration took, ask what to do about it, and move what is said.

The decision is `tatami.retiling`'s, a pure function of all ranks' times, and the same on every rank. A rule that watches every
iteration has the times travel with the sum of the loss that the Trainer makes anyway, as two numbers for each rank; in a loop
written by hand, `step` sums them itself. The rules of DRPM gather their times every R iterations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.retiling import Controller, Decision, Retiler, Timing, Watcher
from tatami.retiling.columns import works_of
from tatami.retiling.link_watch import WatchedMessage
from tatami.retiling.timing import PROBE_EVERY
from tatami.tiled.model import TiledModel
from tatami.tiled.moving import Moved, move
from tatami.tiled.optimizers import check_optimizer
from tatami.tiled.phases import PhaseTimes
from tatami.tiled.stopwatch import AbstractStopwatch

logger = logging.getLogger(__name__)

_PROBE_SIZE = 256


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


class Retiling:
    """Re-tiles a model while it trains: call `step` after each `optimizer.step()`. The Trainer does.

    Args:
        model: from `tatami.tile`.
        optimizer: its state moves with the weights.
        retiler: when and how to re-tile.

    Raises:
        InputError: the run is elastic: it re-tiles when its ranks change, and only then.
    """

    def __init__(self, model: TiledModel, optimizer: torch.optim.Optimizer, *, retiler: Retiler) -> None:
        check_optimizer(optimizer)
        refuse_elastic(model.comm, "Retiling")
        self._model = model
        self._optimizer = optimizer
        self._retiler = retiler
        kind = Watcher if retiler.watches else Controller
        controller = kind(
            retiler,
            cluster=model.cluster,
            workload=model.workload,
            layout=model.layout,
            known_speeds=model.speeds_known,
        )
        self._controller = controller if isinstance(controller, Controller) else None
        self.watcher = controller if isinstance(controller, Watcher) else None
        self._probe = _Probe(model.phases.stopwatch, model.device)
        self._computed_s = model.phases.computed_s
        self._moved_s = 0.0
        self._heard: list[float] | None = None
        self._window: list[Timing] = []
        self.iteration = 0
        self.checks: list[Check] = []

    def told(self) -> list[float]:
        """This rank's part of what `heard` wants the sum of over all ranks: for each rank two numbers, of which others have 0.

        They are its compute time per work since the last call, and how long the last re-tiling took it. Behind them is a number
        for each message that is watched: the receiver adds when it came, and the sender takes off when it left. None where the
        rule gathers by itself.
        """
        if self.watcher is None:
            return []
        model = self._model
        computed_s = model.phases.computed_s - self._computed_s
        self._computed_s = model.phases.computed_s
        work = model.local_work
        table = [0.0] * (2 * model.comm.size)
        if work > 0:
            table[model.comm.rank] = computed_s / work
        elif model.tile is None and self.iteration % PROBE_EVERY == 0:
            table[model.comm.rank] = self._probe.per_work_s(self.watcher.per_work_s(model.name))
        table[model.comm.size + model.comm.rank], self._moved_s = self._moved_s, 0.0
        return table + [self._late_s(message) for message in self.watcher.links.messages]

    def _late_s(self, message: WatchedMessage) -> float:
        rank, times = self._model.comm.rank, self._model.link_times
        if rank == message.source:
            return -times.sent_s.get(message.dest, 0.0)
        return times.arrived_s.get(message.source, 0.0) if rank == message.dest else 0.0

    def heard(self, summed: Sequence[float]) -> None:
        """Take `summed`: what `told` gives, summed over all ranks."""
        if self.watcher is not None:
            self._heard = list(summed)
            self._model.link_times.begin()

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

    def _watch(self, watcher: Watcher, *, companions: Mapping[torch.Tensor, torch.Tensor] | None) -> Check | None:
        comm = self._model.comm
        if self._heard is None:
            table = torch.tensor(self.told(), dtype=torch.float64, device="cpu")
            comm.allreduce(table)
            self.heard(table.tolist())
        assert self._heard is not None
        per_work_s, took_s = self._heard[: comm.size], self._heard[comm.size : 2 * comm.size]
        late_s = self._heard[2 * comm.size :]
        self._heard = None
        if any(took_s):
            watcher.moved(max(took_s))
        before = watcher.layout
        decision = watcher.take(self.iteration, np.array(per_work_s), late_s=late_s)
        if decision is None:
            return None
        names = zip(self._model.names, per_work_s, strict=True)
        works = works_of(before, workload=self._model.workload)
        compute_s = {name: seconds * works[name] for name, seconds in names if seconds > 0 and name in works}
        clock = self._model.phases.clock
        began_s = clock.now_s()
        check = self._carry_out(decision, compute_s=compute_s, companions=companions)
        if decision.remaps:
            self._moved_s = clock.now_s() - began_s
            self._computed_s = self._model.phases.computed_s
        return check

    def _carry_out(
        self, decision: Decision, *, compute_s: dict[str, float], companions: Mapping[torch.Tensor, torch.Tensor] | None
    ) -> Check:
        moved = None
        if decision.remaps:
            self._optimizer.zero_grad(set_to_none=True)
            moved = move(self._model, decision.layout, optimizer=self._optimizer, companions=companions)
        check = Check(decision=decision, compute_s=compute_s, moved=moved)
        self.checks.append(check)
        if self._model.comm.rank == 0:
            logger.info("%s", decision.reason)
        return check


class _Probe:
    """How fast a rank is that was left out, by a matrix product: it was as slow as it was known to be when it first looked."""

    def __init__(self, stopwatch: AbstractStopwatch, device: torch.device) -> None:
        self._stopwatch = stopwatch
        self._matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=torch.float32, device=device)
        self._first: tuple[float, float] | None = None

    def per_work_s(self, known_s: float) -> float:
        """Seconds per work; `known_s` is what the first look is taken for."""
        took_s = min(self._time_s() for _ in range(3))
        if self._first is None:
            self._first = took_s, known_s
        first_s, then_s = self._first
        return then_s * took_s / first_s if first_s > 0 else then_s

    def _time_s(self) -> float:
        began = self._stopwatch.mark()
        self._matrix @ self._matrix
        return self._stopwatch.between_s(began, self._stopwatch.mark())


def _mean_compute_s(timings: list[Timing]) -> dict[str, float]:
    by_processor: dict[str, list[float]] = {}
    for timing in timings:
        if timing.work > 0:
            by_processor.setdefault(timing.processor, []).append(timing.compute_s)
    return {name: sum(values) / len(values) for name, values in by_processor.items()}
