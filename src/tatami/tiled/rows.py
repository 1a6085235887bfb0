"""The tensors of a pair that have a row for every unit, and cutting ranges of units out of them.

`first.weight` (units_here, inputs) and `first.bias` (units_here,) have their units on axis 0, `second.weight`
(outputs, units_here) on axis 1. The same holds for their gradients and for an optimizer's element-wise state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tatami.tiling import Span


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor and the axis on which its units lie."""

    tensor: torch.Tensor
    axis: int

    @property
    def per_unit(self) -> int:
        """Elements that belong to one unit."""
        return self.tensor.numel() // self.tensor.shape[self.axis] if self.tensor.shape[self.axis] else self._rest()

    def _rest(self) -> int:
        size = 1
        for axis, length in enumerate(self.tensor.shape):
            size *= length if axis != self.axis else 1
        return size

    def cut(self, span: Span) -> torch.Tensor:
        """The view of the units `span`, counted from the first unit of this tensor."""
        return self.tensor.narrow(self.axis, span.start, span.size)


def pack(buffer: torch.Tensor, parts: Iterable[tuple[Rows, Span]]) -> int:
    """Copy the parts into the flat `buffer`, one after the other; returns how many elements were filled."""
    position = 0
    for rows, span in parts:
        view = rows.cut(span)
        buffer[position : position + view.numel()].view(view.shape).copy_(view)
        position += view.numel()
    return position


def blocks(buffer: torch.Tensor, parts: Iterable[tuple[Rows, Span]]) -> Iterable[tuple[Rows, Span, torch.Tensor]]:
    """The inverse view of `pack`: for each part, the piece of the flat `buffer` that holds it, in its shape."""
    position = 0
    for rows, span in parts:
        shape = rows.cut(span).shape
        yield rows, span, buffer[position : position + shape.numel()].view(shape)
        position += shape.numel()
