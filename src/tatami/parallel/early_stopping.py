"""Ending a run that no longer gets better: decided on the value of all ranks, and so by all in the same step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.inputs import check_at_least
from tatami.parallel.evaluating import Measured, weighted_means

_NAME = "value"


class EarlyStopping:
    """Says when a value has not improved for `patience` checks.

        stopping = EarlyStopping(comm, patience=3)
        for epoch in range(100):
            ...
            if stopping.check(validation_loss, num_samples=len(mine)):
                break                                   # on every rank

    It is a callback of `tatami.Trainer`, too: `Trainer(..., callbacks=[EarlyStopping(comm, monitor="accuracy", mode="max")])`.

    Args:
        comm: the ranks.
        monitor: what it looks at as a callback: "loss" of the validation, a metric, or "train_loss" of the epoch.
        patience: checks in a row without an improvement.
        mode: whether less or more is better.
        min_delta: what an improvement must exceed.

    Attributes:
        best: value so far, of all ranks.
        num_bad: checks since then.
    """

    def __init__(
        self,
        comm: AbstractCommunicator,
        *,
        monitor: str = "loss",
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        check_at_least(1, patience=patience)
        if mode not in ("min", "max"):
            raise InputError(f"mode must be 'min' or 'max', not {mode!r}")
        self._monitor = monitor
        self._comm, self._patience, self._mode, self._min_delta = comm, patience, mode, min_delta
        self.best: float | None = None
        self.num_bad = 0

    def check(self, value: float, *, num_samples: int = 1) -> bool:
        """Whether to stop, the same on every rank. Collective.

        Args:
            value: of this rank; what counts is the mean over the samples of all ranks. NaN is never an improvement.
            num_samples: of this rank; 0 if it has none.
        """
        mean = weighted_means(Measured(values={_NAME: value}, num_samples=num_samples), self._comm).get(_NAME, math.nan)
        return self._add(mean)

    def on_train_epoch_end(self, trainer: Any, values: Mapping[str, float]) -> None:
        """For the Trainer: the values of an epoch, the same on every rank, so that nothing is sent.

        Raises:
            InputError: `monitor` is not among them.
        """
        if self._monitor not in values:
            raise InputError(
                f"EarlyStopping monitors {self._monitor!r}, but an epoch gives {', '.join(values)}; give the Trainer "
                "validation data or metrics, or choose one of these"
            )
        if self._add(values[self._monitor]):
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.best, self.num_bad = state["best"], state["num_bad"]

    def _add(self, mean: float) -> bool:
        """Whether to stop after a check that gave `mean` on all ranks."""
        if self._is_better(mean):
            self.best, self.num_bad = mean, 0
        else:
            self.num_bad += 1
        return self.num_bad >= self._patience

    def _is_better(self, mean: float) -> bool:
        if math.isnan(mean):
            return False
        if self.best is None:
            return True
        return mean < self.best - self._min_delta if self._mode == "min" else mean > self.best + self._min_delta
