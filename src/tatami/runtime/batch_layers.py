"""Layers that look at the whole batch, in place of the plain model's: dropout and batch normalization."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tatami.batch_statistics import SharedBatch, run_layer
from tatami.runtime import batch_operations
from tatami.runtime.batch_operations import Factor, UnitFactor
from tatami.runtime.context import ModuleContext, StandsIn
from tatami.stages.stand_in import StandIn


class WholeDropout(StandsIn):
    """Stands in place of the `forward` of a `torch.nn.Dropout`: over the whole batch and all units, of which this rank applies
    its own part.

    Args:
        layer: the plain layer.
        context: what it asks.
        units: inside a pair: the units on the last axis; None outside of pairs.
        samples_axis: of what it is applied to.
        orders: those of its axes in memory.
    """

    def __init__(
        self,
        layer: nn.Dropout,
        *,
        context: ModuleContext,
        units: UnitFactor | None = None,
        samples_axis: int = 0,
        orders: Collection[tuple[int, ...]] = (),
    ) -> None:
        self._layer = layer
        self._samples_axis, self._orders = samples_axis, orders
        self._context = context
        self._units = units

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """(samples_here, ..., units_here), or with the samples on another axis, to the same shape."""
        if not self._layer.training or self._layer.p == 0.0:
            return input
        axes = range(input.dim())
        shape: list[tuple[Factor, ...]] = [("samples",) if axis == self._samples_axis else (None,) for axis in axes]
        if self._units is not None:
            shape[-1] = (self._units,)
        return batch_operations.dropout(self._context, input, self._layer.p, tuple(shape), self._orders)


class WholeBatchNorm(StandsIn):
    """Stands in place of the `forward` of a `torch.nn.BatchNorm1d`, 2d or 3d, with the statistics of the global batch.

    Args:
        layer: the plain layer.
        name: of the layer.
        context: what it asks.
    """

    def __init__(self, layer: _BatchNorm, *, name: str, context: ModuleContext) -> None:
        self._layer, self._name, self._context = layer, name, context

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """(values_here, channels, ...) to the same shape."""

        if isinstance(input, StandIn):  # of another stage, whose ranks sum by themselves; a single sample is no error here
            return torch.empty_like(input)

        def batch() -> SharedBatch | None:
            if self._context.rank.comm is None:
                return None
            return batch_operations.shared_batch(self._context, (None,), input, name=self._name)

        return run_layer(self._layer, input, batch=batch)
