"""Vertical communication: between the ranks of a column, which share samples and split units.

Two operations, each the other's derivative (Shoeybi et al. 2019, arXiv 1909.08053, call them g and f):

    sum_over_column     forward: sum of the partial products    backward: nothing to do, every rank has the whole gradient
    copy_to_column      forward: nothing to do                  backward: sum of the partial input gradients
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tatami.comm.base import AbstractCommunicator
from tatami.nn.phases import Phase, Phases


class Column:
    """What the tiled layers of a rank know about their column: how to sum over it, and the stopwatch.

    Attributes:
        comm: the ranks of the column; None where the rank is alone in it, or has no tile.
    """

    def __init__(self, phases: Phases) -> None:
        self.comm: AbstractCommunicator | None = None
        self.phases = phases

    def sum_(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the column, in place."""
        if self.comm is None:
            return
        with self.phases.during(Phase.VERTICAL):
            self.comm.allreduce(tensor)


class _SumOverColumn(torch.autograd.Function):
    @staticmethod
    def forward(partial: torch.Tensor, column: Column) -> torch.Tensor:
        column.sum_(partial)
        return partial

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, Column], output: torch.Tensor) -> None:  # noqa: ARG004
        # The partial product is ours alone (fresh from a matrix product that does not keep it): sum it where it lies.
        ctx.mark_dirty(inputs[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:  # noqa: ARG004
        return grad, None


class _CopyToColumn(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, column: Column) -> torch.Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, Column], output: torch.Tensor) -> None:  # noqa: ARG004
        ctx.column = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if grad is None:
            return None, None
        whole = grad.clone(memory_format=torch.contiguous_format)
        ctx.column.sum_(whole)
        return whole, None


def sum_over_column(partial: torch.Tensor, column: Column) -> torch.Tensor:
    """The sum over the column of everyone's partial product (samples_here, ..., outputs), in place."""
    if column.comm is None:
        return partial
    summed: torch.Tensor = _SumOverColumn.apply(partial, column)  # type: ignore[no-untyped-call]
    return summed


def copy_to_column(x: torch.Tensor, column: Column) -> torch.Tensor:
    """`x` (samples_here, ..., inputs), the same on all ranks of the column, whose gradient is summed over the column."""
    if column.comm is None or not x.requires_grad:
        return x
    copied: torch.Tensor = _CopyToColumn.apply(x, column)  # type: ignore[no-untyped-call]
    return copied
