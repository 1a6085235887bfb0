"""What a user adds to the Trainer's loop: when the learning rate changes, and callbacks with Lightning's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tatami.errors import CheckpointError, InputError, warn
from tatami.inputs import check_at_least
from tatami.train.retiling import Check

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
        if not isinstance(self.scheduler, LRScheduler) and not callable(self.scheduler):
            raise InputError(
                "scheduler must be one of torch.optim.lr_scheduler, or what makes one from the optimizer, as "
                f"partial(torch.optim.lr_scheduler.StepLR, step_size=10), not {self.scheduler!r}"
            )
        if self.interval not in get_args(Interval):
            raise InputError(f"interval must be 'epoch' or 'step', not {self.interval!r}")
        check_at_least(1, frequency=self.frequency)


class LearningRate:
    """Steps one scheduler.

    Args:
        config: the scheduler, and when.

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
        return {"count": self._count, "kind": type(self.scheduler).__name__, "scheduler": self.scheduler.state_dict()}

    def check(self, state: dict[str, Any]) -> None:
        """
        Raises:
            CheckpointError: the state is of another kind of scheduler.
        """
        kind = type(self.scheduler).__name__
        if state.get("kind", kind) != kind:  # an earlier version did not say it
            raise CheckpointError(
                f"its learning rates are of {state['kind']}, and this run's scheduler is {kind}. Give the same kind"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        self.scheduler.load_state_dict(state["scheduler"])


class Callback:
    """Called by the Trainer, on every rank; override what you need. A hook may set `trainer.should_stop`, on any rank.

    `state_dict` and `load_state_dict`, where a callback has them, make it part of checkpoints.
    """

    def on_fit_start(self, trainer: Any) -> None:
        """The data are checked; nothing is resumed or trained yet."""

    def on_train_epoch_start(self, trainer: Any) -> None:
        """Before the first batch of an epoch, or of what is left of it: where a run is resumed, or on a rank that joins, alone.

        The state of callbacks, the optimizer's settings and the random state are then put back as they were taken over.
        """

    def on_train_batch_end(self, trainer: Any, loss: float) -> None:
        """After every update; `loss` is over the samples of its batches, before it."""

    def on_retile(self, trainer: Any, check: Check) -> None:
        """After every look at the balance; `check.moved` is None where the tiling was kept."""

    def on_train_epoch_end(self, trainer: Any, values: Mapping[str, float]) -> None:
        """After every epoch and its validation: `train_loss`, and what `evaluate` gave for the validation data."""

    def on_fit_end(self, trainer: Any) -> None:
        """After the last update, where no error ended the run."""

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        """An error ends the run, perhaps on this rank alone: nothing collective here."""


_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """All callbacks of a Trainer, in their order. Any object that has some of the hooks, or a state to be saved, will do.

    Raises:
        InputError: something else is among them, or they are no list.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        if not isinstance(callbacks, Iterable):
            raise InputError(f"callbacks must be a list of callbacks, not {callbacks!r}")
        self._all = tuple(callbacks)
        for each in self._all:
            if isinstance(each, type) or not any(hasattr(each, name) for name in ("state_dict", *_HOOKS)):
                raise InputError(
                    f"callbacks: {each!r} is not a callback: give objects with some of the hooks {', '.join(_HOOKS)}, such as "
                    "one of a class made from tatami.train.Callback"
                )

    def __len__(self) -> int:
        return len(self._all)

    def call(self, hook: str, *values: Any) -> None:
        for each in self._all:
            function = getattr(each, hook, None)
            if function is not None:
                function(*values)

    def state_dict(self) -> list[tuple[str, Any]]:
        """The kind and the state of each that has one."""
        return [(type(each).__name__, each.state_dict()) for each in self._all if hasattr(each, "state_dict")]

    def load_state_dict(self, states: Sequence[Any], *, says: bool) -> None:
        """Each gets the state of the next one of its kind; `says`: warn of those that are left."""
        left = [tuple(each) for each in states if isinstance(each, list | tuple)]
        for each in self._all:
            found = next((one for one in left if one[0] == type(each).__name__), None)
            if found is not None and hasattr(each, "load_state_dict"):
                left.remove(found)
                each.load_state_dict(found[1])
        if left and says:
            warn(f"the checkpoint has states of callbacks that this run does not have: {', '.join(kind for kind, _ in left)}")
