"""Optimizers that run on the servers, on one shard at a time; the formulas are those of torch.optim, element by element."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tatami.errors import InputError

Vector = NDArray[np.floating[Any]]


class AbstractOptimizer(ABC):
    """How a shard takes a step; its state is a few vectors as long as the shard, by name."""

    slots: tuple[str, ...]

    @abstractmethod
    def step(self, parameters: Vector, gradient: Vector, *, state: dict[str, Vector], count: int) -> None:
        """Change `parameters` and `state`, all (elements,), in place; `gradient` is scratch; `count` starts at 1."""


@dataclass(frozen=True, kw_only=True)
class SGD(AbstractOptimizer):
    """Gradient descent, with momentum if it is not 0.

    Raises:
        InputError: `lr` is not positive, or momentum not in [0, 1).
    """

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InputError(f"SGD(lr=...) must be a finite number > 0, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"SGD(momentum=...) must be in [0, 1), not {self.momentum}")

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("momentum",) if self.momentum else ()

    def step(self, parameters: Vector, gradient: Vector, *, state: dict[str, Vector], count: int) -> None:  # noqa: ARG002
        if self.momentum:
            state["momentum"] *= self.momentum
            state["momentum"] += gradient
            np.copyto(gradient, state["momentum"])
        gradient *= self.lr
        parameters -= gradient


@dataclass(frozen=True, kw_only=True)
class Adam(AbstractOptimizer):
    """Adam (Kingma and Ba, 2015).

    Raises:
        InputError: `lr` or `eps` is not positive, or a beta not in [0, 1).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    slots = ("first", "second")

    def __post_init__(self) -> None:
        if not (0 < self.lr < math.inf and 0 < self.eps < math.inf):
            raise InputError(f"Adam(lr=..., eps=...) must be finite numbers > 0, not {self.lr}, {self.eps}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"Adam(betas=...) must be in [0, 1), not {self.betas}")

    def step(self, parameters: Vector, gradient: Vector, *, state: dict[str, Vector], count: int) -> None:
        first, second = state["first"], state["second"]
        one, two = self.betas
        first *= one
        first += (1 - one) * gradient
        second *= two
        second += (1 - two) * gradient * gradient
        root = np.sqrt(second)
        root /= math.sqrt(1 - two**count)
        root += self.eps
        parameters -= (self.lr / (1 - one**count)) * first / root
