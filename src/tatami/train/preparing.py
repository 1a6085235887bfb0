"""What a Trainer trains with, where it is, when a call of `fit` ends, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch

from tatami.clock import Clock
from tatami.errors import InputError
from tatami.inputs import check_at_least, check_finite
from tatami.model.model import TiledModel
from tatami.progress import Progress
from tatami.records import Records
from tatami.state.good_state import GoodState
from tatami.train.objective import Objective
from tatami.train.retiling import Check, Retiling
from tatami.train.scheduling import Callbacks, LearningRate
from tatami.train.updating import Updates, UpdateSettings
from tatami.units import parse_duration


@dataclass(kw_only=True)
class TrainingPosition:
    """How far training has come, in whole updates.

    Attributes:
        iteration: updates so far.
        epoch: epochs so far.
        batch: batches of the running epoch so far.
        epoch_loss, epoch_samples: sums over them.
        begun_iteration, begun_epoch: when `fit` was called.
    """

    iteration: int = 0
    epoch: int = 0
    batch: int = 0
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    begun_iteration: int = 0
    begun_epoch: int = 0

    def begin_fit(self) -> None:
        self.begun_iteration, self.begun_epoch = self.iteration, self.epoch
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.batch = self.epoch_samples = 0
        self.epoch_loss = 0.0


@dataclass(kw_only=True)
class TrainingSetup:
    """The parts of a Trainer whose model is tiled; see there."""

    model: TiledModel
    optimizer: torch.optim.Optimizer
    objective: Objective
    settings: UpdateSettings
    updates: Updates
    good: GoodState
    learning_rate: LearningRate | None
    retiling: Retiling | None
    callbacks: Callbacks
    records: Records
    record_every: int
    progress: Progress
    clock: Clock


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The first that is reached ends it; the same on all ranks.

    Attributes:
        epochs: passes over the data.
        iterations: updates.
        stop_below: a loss.
        max_time_s: by the clock of rank 0, after an update.
    """

    epochs: int | None = None
    iterations: int | None = None
    stop_below: float | None = None
    max_time_s: float | None = None

    @classmethod
    def of(
        cls, *, epochs: int | None, iterations: int | None, stop_below: float | None, max_time: str | float | timedelta | None
    ) -> Limits:
        """
        Args:
            epochs, iterations, stop_below: as above.
            max_time: "90 min", seconds, or a `timedelta`.

        Raises:
            InputError: none is given, or an invalid one.
        """
        if epochs is None and iterations is None and stop_below is None and max_time is None:
            raise InputError("say when to stop: epochs, iterations, max_time or stop_below")
        if stop_below is not None:
            check_finite(stop_below, name="stop_below")
        check_at_least(1, epochs=epochs, iterations=iterations)
        seconds = None
        if max_time is not None:
            seconds = max_time.total_seconds() if isinstance(max_time, timedelta) else parse_duration(max_time)
            if seconds <= 0:
                raise InputError(f"max_time must be above 0, not {max_time}")
        return cls(epochs=epochs, iterations=iterations, stop_below=stop_below, max_time_s=seconds)


Stopped = Literal["epochs", "iterations", "loss", "time", "callback"]


@dataclass(kw_only=True)
class History:
    """What a call of `fit` did.

    Attributes:
        losses: of every iteration: the loss over the samples of its update, before it.
        iteration_s: of every iteration, as rank 0 saw it.
        num_samples: of every iteration: the samples of its update, over all ranks.
        checks: every look at the balance.
        validation: of every epoch, where validation data were given.
        stopped: why it ended.
    """

    losses: list[float] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    num_samples: list[int] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    stopped: Stopped = "epochs"
