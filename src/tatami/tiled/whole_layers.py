"""Layers that look at the whole batch, in place of the plain model's: dropout and batch normalization."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tatami.tiled import whole_batch
from tatami.tiled.context import ModuleContext
from tatami.tiled.whole_batch import Factor, UnitFactor


class WholeDropout(nn.Module):
    """`torch.nn.Dropout` over the whole batch and all units, of which this rank applies its own part.

    Args:
        p: probability of a zero.
        context: what it asks.
        units: inside a pair: the units on the last axis; None outside of pairs.
        samples_axis: of what it is applied to.
    """

    def __init__(self, p: float, *, context: ModuleContext, units: UnitFactor | None = None, samples_axis: int = 0) -> None:
        super().__init__()
        self.p = p
        self._samples_axis = samples_axis
        self._context = context
        self._units = units

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples_here, ..., units_here), or with the samples on another axis, to the same shape."""
        if not self.training or self.p == 0.0:
            return x
        shape: list[tuple[Factor, ...]] = [("samples",) if axis == self._samples_axis else (None,) for axis in range(x.dim())]
        if self._units is not None:
            shape[-1] = (self._units,)
        return whole_batch.dropout(self._context, x, self.p, tuple(shape))

    def extra_repr(self) -> str:
        return f"p={self.p}"


class WholeBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, 2d or 3d with the statistics of the global batch.

    It has the parameters and buffers of the layer in whose place it stands, whatever becomes of them.

    Args:
        layer: the plain layer.
        context: what it asks.
    """

    def __init__(self, layer: _BatchNorm, *, context: ModuleContext) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self._parameters = layer._parameters
        self._buffers = layer._buffers
        self.training = layer.training
        self._context = context

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(samples_here, channels, ...) to the same shape."""
        batch_statistics = self.training or self.running_mean is None
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        tracked = (self.running_mean, self.running_var) if not self.training or self.track_running_stats else (None, None)
        return whole_batch.batch_norm(
            self._context, (None,), input, self.weight, self.bias, *tracked, batch_statistics, momentum, self.eps
        )
