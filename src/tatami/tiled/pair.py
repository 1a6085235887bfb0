"""A tiled pair: Linear(inputs -> units), activation, Linear(units -> outputs), of which each rank holds some units.

The parameters keep the names and the meaning they have in `torch.nn.Linear`; only their unit axis is shorter here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tatami.tiled.vertical import ColumnComm, copy_to_column, sum_over_column


class _CutLinear(nn.Module):
    """The weight and the bias of a Linear that was cut, under their names."""

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, *, column: ColumnComm) -> None:
        super().__init__()
        self.column = column
        self.weight = linear.weight
        self.bias = linear.bias


class TiledFirst(_CutLinear):
    """The first Linear of a pair, whose weight was cut: uneven rows of it.

    Attributes:
        weight: (units_here, inputs) of (units, inputs).
        bias: (units_here,) of (units,), or None.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples_here, ..., inputs) to (samples_here, ..., units_here)."""
        return F.linear(copy_to_column(x, self.column), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"inputs={self.weight.shape[1]}, units_here={self.weight.shape[0]}"


class TiledSecond(_CutLinear):
    """The second Linear of a pair, whose weight was cut: uneven columns of it. Its output is summed over the column of ranks.

    Attributes:
        weight: (outputs, units_here) of (outputs, units).
        bias: (outputs,), the same on every rank, or None.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(samples_here, ..., units_here) to (samples_here, ..., outputs), the whole sum on every rank of the column."""
        if self.column.comm is None:
            return F.linear(hidden, self.weight, self.bias)
        output = sum_over_column(F.linear(hidden, self.weight), self.column)
        return output if self.bias is None else output + self.bias.to(output.dtype)  # under autocast they differ

    def extra_repr(self) -> str:
        return f"units_here={self.weight.shape[1]}, outputs={self.weight.shape[0]}"
