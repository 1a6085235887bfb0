"""DRPM at work: record what every iteration took, ask the controller every R iterations, and move what it says.

The decision is `tatami.retiling`'s, a pure function of the gathered timings, and the same on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tatami.retiling import Controller, Decision, Retiler, Timing
from tatami.tiled.model import TiledModel
from tatami.tiled.moving import Moved, move
from tatami.tiled.optimizers import check_optimizer
from tatami.tiled.phases import PhaseTimes

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


class Retiling:
    """Re-tiles a model while it trains: call `step` after each `optimizer.step()`. The Trainer does.

    Args:
        model: from `tatami.tile`.
        optimizer: its state moves with the weights.
        retiler: when and how to re-tile.
    """

    def __init__(self, model: TiledModel, optimizer: torch.optim.Optimizer, *, retiler: Retiler) -> None:
        check_optimizer(optimizer)
        self._model = model
        self._optimizer = optimizer
        self._retiler = retiler
        self._controller = Controller(
            retiler,
            cluster=model.cluster,
            workload=model.workload,
            layout=model.layout,
            known_speeds=model.speeds_known,
        )
        self._window: list[Timing] = []
        self.iteration = 0
        self.checks: list[Check] = []

    def step(self, *, companions: Mapping[nn.Parameter, torch.Tensor] | None = None) -> Check | None:
        """End the iteration. Collective. Returns the check if one was due.

        A re-tiling drops the gradients, which the optimizer has used, and moves `companions` along (see `move`).
        """
        return self.record(self._model.phases.finish_iteration(), companions=companions)

    def record(self, times: PhaseTimes, *, companions: Mapping[nn.Parameter, torch.Tensor] | None = None) -> Check | None:
        """As `step`, with the times of the iteration."""
        self.iteration += 1
        model = self._model
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
        moved = None
        if decision.remaps:
            self._optimizer.zero_grad(set_to_none=True)
            moved = move(model, decision.layout, optimizer=self._optimizer, companions=companions)
            self._window.clear()
        check = Check(decision=decision, compute_s=_mean_compute_s(gathered), moved=moved)
        self.checks.append(check)
        if model.comm.rank == 0:
            logger.info("%s", decision.reason)
        return check


def _mean_compute_s(timings: list[Timing]) -> dict[str, float]:
    by_processor: dict[str, list[float]] = {}
    for timing in timings:
        if timing.work > 0:
            by_processor.setdefault(timing.processor, []).append(timing.compute_s)
    return {name: sum(values) / len(values) for name, values in by_processor.items()}
