"""A model that computes nothing: what parameter servers take besides the work of a network."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn


class Weight(nn.Module):
    """One vector of parameters whose gradient lies ready.

    Args:
        elements: of float32.
        task_s: that a forward pass sleeps, in place of work.
    """

    def __init__(self, elements: int, *, task_s: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self._ready = np.full(elements, 1e-3, dtype=np.float32)
        self._task_s = task_s

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ARG002 - nothing is computed
        time.sleep(self._task_s)
        return _Gradient.apply(self.weight, self._ready)  # type: ignore[no-untyped-call]


def no_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - nothing is computed
    """The loss of a `Weight`."""
    return output


class _Gradient(torch.autograd.Function):
    """A sum whose gradient lies ready, so that nothing is computed and nothing is copied."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ready: np.ndarray[Any, Any]) -> torch.Tensor:
        ctx.ready = ready
        return weight[:1].sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(ctx.ready), None  # a new tensor, which autograd takes as it is
