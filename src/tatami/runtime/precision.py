"""The precision of a training run: that of the weights, or with products in half precision (autocast)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch

from tatami.errors import InputError

Precision = Literal["bf16-mixed", "16-mixed"]
"""The names that Lightning has: weights keep their dtype, and autocast chooses what is computed in half precision."""

_DTYPES: dict[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def check_precision(precision: object) -> None:
    """
    Raises:
        InputError: `precision` is none that is known here.
    """
    if precision is not None and precision not in get_args(Precision):
        raise InputError(
            f"precision must be 'bf16-mixed', '16-mixed' or None (the dtype of the weights), not {precision!r}; for weights of "
            "another dtype, convert the network before: network.double()"
        )


@contextmanager
def without_autocast() -> Iterator[None]:
    """The dtype of the weights, also where the caller has entered `torch.autocast`."""
    with ExitStack() as stack:
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def autocast(precision: Precision | None, device: torch.device) -> Any:
    """A context in which forward passes are computed in `precision`."""
    dtype = _DTYPES.get(precision or "")
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # making one that does nothing takes a good part of a small step
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
