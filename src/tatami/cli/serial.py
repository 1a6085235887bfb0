"""What one iteration takes every rank alone, measured between the iterations of all: what efficiency is measured by."""

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
"""Iterations between two measurements; the last rounds of a run are measured, when it has settled."""


class AloneBetween(Callback):
    """Lets every rank do an ordinary PyTorch iteration over the whole batch, all at once, `LEAST_ROUNDS` times in a run's end.

    At the pace of the rank, where it plays a slower machine. It is no part of any iteration's time.
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
        """The rounds, of which each has the iterations since the one before. Collective.

        Args:
            iteration_s: of all iterations of the run, on this rank.
        """
        everyone = self._comm.allgather_object(self._alone_s)
        return [
            EfficiencyRound(iteration_s=median(iteration_s[at - BETWEEN : at]), alone_s=tuple(own[at] for own in everyone))
            for at in sorted(self._alone_s)
        ]
