"""What a Trainer trains with, and where it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tatami.clock import Clock
from tatami.progress import Progress
from tatami.records import Records
from tatami.tiled.callbacks import Callbacks
from tatami.tiled.good_state import GoodState
from tatami.tiled.model import TiledModel
from tatami.tiled.objective import Objective
from tatami.tiled.retiling import Retiling
from tatami.tiled.scheduling import LearningRate
from tatami.tiled.updating import Updates, UpdateSettings


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
