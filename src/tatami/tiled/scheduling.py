"""When the learning rate changes: by step or by epoch, or when a value no longer gets better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tatami.errors import InputError
from tatami.inputs import check_at_least

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
Interval = Literal["epoch", "step"]


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """A learning-rate scheduler and when it is stepped, in the words of Lightning.

    Attributes:
        scheduler: makes one from the optimizer, or is one of it.
        interval: "epoch", or "step": after an update.
        frequency: so many epochs or updates from one step to the next.
        monitor: what `ReduceLROnPlateau` looks at: "loss" of the validation, a metric, or "train_loss", the only one there is
            after an update.
    """

    scheduler: MakeScheduler | LRScheduler
    interval: Interval = "epoch"
    frequency: int = 1
    monitor: str = "loss"

    def __post_init__(self) -> None:
        if self.interval not in get_args(Interval):
            raise InputError(f"interval must be 'epoch' or 'step', not {self.interval!r}")
        check_at_least(1, frequency=self.frequency)


class LearningRate:
    """Steps one scheduler.

    Args:
        config: the scheduler, and when.
        optimizer: whose learning rate it is.

    Raises:
        InputError: the scheduler is of another optimizer.
    """

    def __init__(self, config: LRSchedulerConfig, optimizer: torch.optim.Optimizer) -> None:
        made = config.scheduler
        self.scheduler: LRScheduler = made if isinstance(made, LRScheduler) else made(optimizer)
        if self.scheduler.optimizer is not optimizer:
            raise InputError(
                "the scheduler is of another optimizer than the Trainer's; give what makes it: "
                "partial(torch.optim.lr_scheduler.StepLR, step_size=10)"
            )
        self._config = config
        self._count = 0

    def step(self, interval: Interval, values: Mapping[str, float]) -> None:
        """An epoch or an update has ended, with `values`.

        Raises:
            InputError: the value that the scheduler looks at is not among them.
        """
        config = self._config
        if interval != config.interval:
            return
        self._count += 1
        if self._count % config.frequency:
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            return
        if config.monitor not in values:
            raise InputError(
                f"the scheduler monitors {config.monitor!r}, but there is only {', '.join(values)} after an {interval}; give "
                "validation data, or LRSchedulerConfig(scheduler=..., monitor='train_loss')"
            )
        self.scheduler.step(values[config.monitor])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        self.scheduler.load_state_dict(state["scheduler"])
