"""How values of different ranks become one: sum, mean, max, min, on tensors in place."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (torch.float64, torch.float32, *HALF_DTYPES)


class Op(Enum):
    """How values of different ranks become one."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Reduction(Enum):
    """What an all-reduce computes. NaN in any rank's element is NaN in the result, of all four."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"

    @property
    def op(self) -> Op:
        """What is done with two values; a mean is a sum, divided once."""
        return Op.SUM if self is Reduction.MEAN else Op(self.value)


TORCH: dict[Op, Callable[..., Any]] = {Op.SUM: torch.add, Op.MAX: torch.maximum, Op.MIN: torch.minimum}
NUMPY: dict[Op, Callable[[Any, Any, Any], object]] = {
    Op.SUM: np.add,
    Op.MAX: lambda one, other, out: np.maximum(one, other, out=out),
    Op.MIN: lambda one, other, out: np.minimum(one, other, out=out),
}
"""(one, other, out); np.add takes them by position, which saves a tenth of a microsecond."""


def combine(target: torch.Tensor, values: torch.Tensor, op: Op, *, out: torch.Tensor | None = None) -> None:
    """`values` reduced into `target`, elementwise, in place, or into `out`. bool sums are `or`."""
    into = target if out is None else out
    if target.dtype == torch.bool:
        (torch.logical_and if op is Op.MIN else torch.logical_or)(target, values, out=into)
        return
    TORCH[op](target, values, out=into)


def divide(tensor: torch.Tensor, divisor: int) -> None:
    """In place."""
    torch.div(tensor, divisor, out=tensor)
