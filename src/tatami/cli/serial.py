"""Times of one iteration on every rank alone, measured between the iterations of all; efficiency is computed from them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from tatami.cli.training_job import Prepared
from tatami.clock import NO_PACE, SystemClock
from tatami.comm import AbstractCommunicator
from tatami.report.measured_rounds import LEAST_ROUNDS, EfficiencyRound
from tatami.testing.slowdown import Slowdown
from tatami.train import Callback

BETWEEN = 4
"""Iterations between two measurements, which are made in the last rounds of a run, when it has settled."""


class AloneBetween(Callback):
    """Runs an ordinary PyTorch iteration over the whole batch on all ranks at once, `LEAST_ROUNDS` times at the end of a run.

    It runs at the pace of the rank, if the rank emulates a slower machine, and is not part of the time of any iteration.
    """

    def __init__(self, prepared: Prepared, comm: AbstractCommunicator) -> None:
        self._comm = comm
        self._prepared = prepared
        self._model = copy.deepcopy(prepared.model)
        self._optimizer = prepared.make_optimizer(self._model.parameters())
        train = prepared.task.train
        self._x, self._y = train.x[: prepared.batch_size], train.y[: prepared.batch_size]
        self._pace = NO_PACE if prepared.emulation is None else Slowdown(prepared.emulation.factors[comm.rank])
        self._clock = SystemClock()
        self._alone_s: dict[int, float] = {}
        iterations = prepared.iterations or 0
        enough = iterations > BETWEEN * (LEAST_ROUNDS + 1)
        self._due = {iterations - BETWEEN * number for number in range(LEAST_ROUNDS)} if enough else set()

    def on_train_batch_end(self, trainer: Any, loss: float) -> None:  # noqa: ARG002
        if trainer.iteration not in self._due:
            return
        if not self._alone_s:
            self._once()  # the first one warms up
        self._comm.barrier()
        start_s = self._clock.now_s()
        self._once()
        self._alone_s[trainer.iteration] = self._clock.now_s() - start_s
        self._comm.barrier()

    def _once(self) -> None:
        self._pace.begin()
        self._optimizer.zero_grad()
        torch.autograd.backward(self._prepared.task.loss(self._model(self._x), self._y))
        self._optimizer.step()
        self._pace.end()

    def rounds(self, iteration_s: Sequence[float]) -> list[EfficiencyRound]:
        """Return the rounds, each with the iterations since the previous one. Collective.

        Args:
            iteration_s: the times of all iterations of the run, on this rank.
        """
        everyone = self._comm.allgather_object(self._alone_s)
        return [
            EfficiencyRound(iteration_s=median(iteration_s[at - BETWEEN : at]), alone_s=tuple(own[at] for own in everyone))
            for at in sorted(self._alone_s)
        ]
