"""Dropout that draws what the plain model would, on every tiling.

Every rank draws the noise of the whole batch and of all units from a generator in the same state, and keeps its own rectangle
of it. So a tiled run with dropout equals the plain run; the price is that the drawing itself is not split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tatami.errors import InputError
from tatami.tiling import Span


class WholeDropout(nn.Module):
    """`torch.nn.Dropout` over the whole batch and all units, of which this rank applies its own part.

    Args:
        p: probability of a zero.
        generator: the model's own, in the same state on every rank.
        batch: gives the global batch size and the samples of this rank.
        units: inside a pair: gives the number of all units and the ones here; None outside of pairs.
    """

    def __init__(
        self,
        p: float,
        *,
        generator: torch.Generator,
        batch: Callable[[], tuple[int, Span]],
        units: Callable[[], tuple[int, Span]] | None = None,
    ) -> None:
        super().__init__()
        self.p = p
        self._generator = generator
        self._batch = batch
        self._units = units

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples_here, ..., units_here) to the same shape."""
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * torch.zeros_like(x)
        samples, mine = self._batch()
        if x.shape[0] != mine.size:
            raise InputError(
                f"dropout got {x.shape[0]} rows where {mine.size} of {samples} samples are this rank's. Pass what "
                "model.local(...) returned, and keep the samples on the first axis of what dropout is applied to"
            )
        shape = [samples, *x.shape[1:]]
        if self._units is not None:
            shape[-1] = self._units()[0]
        noise = torch.empty(shape, dtype=x.dtype).bernoulli_(1.0 - self.p, generator=self._generator)
        part = noise[mine.slice()]
        if self._units is not None:
            part = part[..., self._units()[1].slice()]
        return x * part.div(1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
