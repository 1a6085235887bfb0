"""A moving average of weights, whose state is the weights' own: it moves, and is saved and restored, with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tatami.errors import InputError
from tatami.runtime.norms import models
from tatami.same_steps import know, optimizers_of
from tatami.stages.stand_in import StandIn

_AVERAGE = "average"


class WeightAverage(torch.optim.Optimizer):
    """An exponential moving average of weights: after each step of the optimizer, call `step`.

        average = tatami.train.WeightAverage(model.parameters(), decay=0.999)
        ...
        optimizer.step()
        average.step()
        ...
        with average.applied():
            tatami.train.save_model(model, "average.safetensors")

    It is an optimizer that changes no weight: its state belongs to the weights, element by element, so it moves with them, and
    checkpoints of the Trainer and of `tatami.save_training` have it without being given it. Each rank has the averages of all
    weights that it holds, also where the optimizer is sharded. `torch.optim.swa_utils.AveragedModel` copies the network, which
    a tiled model refuses.

    Args:
        parameters: of the tiled model.
        decay: the part of the average that is kept in a step.

    Attributes:
        num_steps: how many were made in this process, or in those of the run that it has joined.
        is_applied: whether the averages are to be in place of the weights.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise InputError(f"decay must be a part between 0 and 1, not {decay}")
        super().__init__(parameters, {"decay": decay})
        self.num_steps = 0
        self.is_applied = self._is_swapped = self._is_ahead = False
        know(self)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take the weights as they are now into the average; the first time they are the average."""
        del closure
        self.check_not_applied("average.step()")
        if not self._is_ahead:
            self._take_in()
        self._is_ahead = False

    def catch_up(self, num_steps: int) -> None:
        """Make the step that others have made after the last update, which this rank's script is yet to ask for."""
        if self.num_steps < num_steps:
            self._take_in()
            self._is_ahead = True

    @torch.no_grad()
    def _take_in(self) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, StandIn):
                    continue
                state = self.state[parameter]
                if _AVERAGE in state:
                    state[_AVERAGE].lerp_(parameter.detach(), 1.0 - group["decay"])
                else:
                    state[_AVERAGE] = parameter.detach().clone()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The averages in place of the weights, to evaluate or to save them."""
        self.check_not_applied("another average.applied()")
        self.is_applied = True
        self.swap()
        try:
            yield
        finally:
            self.is_applied = False
            self.swap()

    def check_not_applied(self, what: str) -> None:
        """
        Raises:
            InputError: the averages are in place of the weights.
        """
        if self.is_applied:
            raise InputError(f"{what} comes within `with average.applied()`, where averages are in place of the weights")

    @torch.no_grad()
    def swap(self, *, back: bool = False) -> None:
        """Put what is to be in the network there: by `is_applied`, or, to go `back` for a while, the weights."""
        if self._is_swapped == (self.is_applied and not back):
            return
        self._is_swapped = not self._is_swapped
        for parameter, state in self.state.items():
            now = parameter.detach().clone()
            parameter.copy_(state[_AVERAGE])
            state[_AVERAGE].copy_(now)

    def value_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The average of a weight here; None where there is none yet."""
        value: torch.Tensor | None = self.state.get(parameter, {}).get(_AVERAGE)
        return value

    def restore(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Have what `value_of` returned, on whatever ranks."""
        self.state.pop(parameter, None)
        if value is not None:
            self.state[parameter] = {_AVERAGE: value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.load_state_dict`, for weights that are not tiled.

        Raises:
            InputError: they are, and the state might be of other rows of them.
        """
        held = {id(each) for group in self.param_groups for each in group["params"]}
        if any(id(each) in held for model in models() if isinstance(model, nn.Module) for each in model.parameters()):
            raise InputError(REFUSED.format(what="the state of a WeightAverage"))
        super().load_state_dict(state_dict)


REFUSED = (
    "{what} is of this rank's part of the tiled model's weights, and would be given to ranks that hold other parts. Leave it "
    "out: the Trainer's checkpoints, tatami.save_training and elastic runs take every WeightAverage along by themselves, and "
    "other optimizers as tatami.save_training(folder, [model, model], [optimizer, another], ...)"
)


def averages_of(parameters: Iterable[nn.Parameter]) -> list[WeightAverage]:
    """The averages of any of these parameters, in the order in which they were made."""
    return [each for each in optimizers_of(parameters) if isinstance(each, WeightAverage)]
