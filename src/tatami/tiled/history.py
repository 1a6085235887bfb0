"""What a call of `Trainer.fit` did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tatami.tiled.retiling import Check

Stopped = Literal["epochs", "iterations", "loss", "time", "callback"]


@dataclass(kw_only=True)
class History:
    """What a call of `fit` did.

    Attributes:
        losses: of every iteration: the loss over the samples of its update, before it.
        iteration_s: of every iteration, as rank 0 saw it.
        checks: every look at the balance.
        validation: of every epoch, where validation data were given.
        stopped: why it ended.
    """

    losses: list[float] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    stopped: Stopped = "epochs"
