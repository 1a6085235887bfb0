"""A layer of a rank that is short of memory: it keeps its input, and computes the rest once more in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn

from tatami.runtime.context import StandsIn


class RecomputedForward(StandsIn):
    """Stands in place of the `forward` of a layer: keeps its input alone for the backward pass where the plan says so.

    Args:
        layer: whose forward pass it is, as it is now.
        is_on: whether this rank recomputes in the present layout.
    """

    def __init__(self, layer: nn.Module, *, is_on: Callable[[], bool]) -> None:
        self._layer, self._forward, self._is_on = layer, layer.forward, is_on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own forward pass."""
        if not self._is_on() or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        calls = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            with _statistics_as_they_are(self._layer) if calls > 1 else nullcontext():
                return self._forward(*args, **kwargs)

        return checkpointing.checkpoint(run, *args, use_reentrant=False, **kwargs)


@contextmanager
def _statistics_as_they_are(layer: nn.Module) -> Iterator[None]:
    """Running statistics have taken in this batch when the layer is computed once more: that updates copies of them."""
    norms = [(each, dict(each._buffers)) for each in layer.modules() if isinstance(each, nn.modules.batchnorm._NormBase)]
    for norm, buffers in norms:
        norm._buffers.update({name: None if own is None else own.clone() for name, own in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in norms:
            norm._buffers.update(buffers)
