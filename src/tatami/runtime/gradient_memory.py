"""The memory in which gradients are summed across replicas, so that a message is one piece of it, or few."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tatami.runtime.rows import Rows
from tatami.tiling import Span


class GradientVector:
    """Gradients one after the other, where every rank has all of them: as few calls as there can be.

    Args:
        tensors: to be summed.
        dtype: in which they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, dtype: torch.dtype) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        self._values = tensors[0].new_empty(sum(sizes), dtype=dtype)
        self._slots = [slot.view(tensor.shape) for slot, tensor in zip(torch.split(self._values, sizes), tensors, strict=True)]

    def span(self, span: Span) -> torch.Tensor:
        """The elements `span`."""
        return self._values[span.start : span.stop]

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill it."""
        torch._foreach_copy_(self._slots, list(tensors))

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Back into the tensors."""
        torch._foreach_copy_(list(tensors), self._slots)


class GradientStage:
    """The gradients of one block, all that belongs to a unit in a row: whatever tensors they are of, units that lie together
    are one piece of memory. On a tenth of a core each view of a tensor costs 30 us, and a message has units of many.

    Args:
        block: the tensors of the block that are to be summed.
        dtype: in which they are.

    Attributes:
        values: (units here, elements of a unit).
    """

    def __init__(self, block: Sequence[Rows], *, dtype: torch.dtype) -> None:
        units = block[0].units if block else 0
        like = block[0].tensor if block else torch.empty(0, dtype=dtype, device="cpu")
        self.values = like.new_empty(units, sum(rows.per_unit for rows in block), dtype=dtype)
        self._slots = []
        start = 0
        for rows in block:
            own = []
            for part in _by_unit(rows):
                stop = start + part[0].numel() if units else start
                own.append(self.values[:, start:stop].view(part.shape))
                start = stop
            self._slots.append(own)

    def span(self, span: Span) -> torch.Tensor:
        """The units `span`, flat."""
        return self.values[span.start : span.stop].view(-1)

    def take(self, block: Sequence[Rows]) -> None:
        """Fill it."""
        for rows, own in zip(block, self._slots, strict=True):
            for part, slot in zip(_by_unit(rows), own, strict=True):
                slot.copy_(part)

    def give(self, block: Sequence[Rows]) -> None:
        """Back into the tensors."""
        for rows, own in zip(block, self._slots, strict=True):
            for part, slot in zip(_by_unit(rows), own, strict=True):
                part.copy_(slot)


def _by_unit(rows: Rows) -> list[torch.Tensor]:
    """Views of a tensor, one for each run, with the units first: (units, ...)."""
    axis, units = rows.runs.axis, rows.units
    if rows.runs.plain:
        return [rows.tensor.movedim(axis, 0)]
    shape = rows.tensor.shape
    return [
        view.view(*shape[:axis], units, view.shape[axis] // max(units, 1), *shape[axis + 1 :]).movedim(axis, 0)
        for view in rows.cut(Span(0, units))
    ]
