"""What a user adds to the Trainer's loop. The hooks have the names that they have in Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tatami.tiled.retiling import Check


class Callback:
    """Called by the Trainer, on every rank; override what you need. A hook may set `trainer.should_stop`, on any rank.

    `state_dict` and `load_state_dict`, where a callback has them, make it part of checkpoints.
    """

    def on_fit_start(self, trainer: Any) -> None:
        """The data are checked; nothing is trained yet."""

    def on_train_epoch_start(self, trainer: Any) -> None:
        """Before the first batch of an epoch, or of what is left of it."""

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


class Callbacks:
    """All callbacks of a Trainer, in their order. Any object that has some of the hooks will do."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._all = tuple(callbacks)

    def __len__(self) -> int:
        return len(self._all)

    def call(self, hook: str, *values: Any) -> None:
        for each in self._all:
            function = getattr(each, hook, None)
            if function is not None:
                function(*values)

    def state_dict(self) -> list[Any]:
        return [each.state_dict() if hasattr(each, "state_dict") else None for each in self._all]

    def load_state_dict(self, states: list[Any]) -> None:
        """Those of a run with the same callbacks, in the same order; of others, nothing is known."""
        for each, state in zip(self._all, states, strict=False):
            if state is not None and hasattr(each, "load_state_dict"):
                each.load_state_dict(state)
