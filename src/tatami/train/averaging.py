"""A moving average of the weights of a tiled model, which goes along where a re-tiling moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tatami.errors import InputError

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

    It is an optimizer that changes no weight: its state belongs to the weights, element by element, so it moves with them.
    `torch.optim.swa_utils.AveragedModel` copies the network, which a tiled model refuses.

    Args:
        parameters: of the tiled model.
        decay: the part of the average that is kept in a step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise InputError(f"decay must be a part between 0 and 1, not {decay}")
        super().__init__(parameters, {"decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take the weights as they are now into the average; the first time they are the average."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if _AVERAGE in state:
                    state[_AVERAGE].lerp_(parameter.detach(), 1.0 - group["decay"])
                else:
                    state[_AVERAGE] = parameter.detach().clone()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The averages in place of the weights, to evaluate or to save them."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, state in self.state.items():
            now = parameter.detach().clone()
            parameter.copy_(state[_AVERAGE])
            state[_AVERAGE].copy_(now)
