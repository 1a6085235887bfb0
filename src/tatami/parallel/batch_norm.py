"""Batch normalization with the statistics of the global batch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tatami.batch_statistics import SharedBatch, run_layer
from tatami.comm.base import AbstractCommunicator
from tatami.comm.short_sum import ShortSum
from tatami.errors import CommError, InputError, ModelError
from tatami.inputs import check_at_least
from tatami.parallel.spanning import AbstractSpanning


class MultiNodeBatchNorm(AbstractSpanning, _BatchNorm):
    """nn.BatchNorm1d, 2d or 3d over the batches of all ranks: outputs, gradients and running statistics are those of one
    process with the whole batch.

    Each rank counts with the samples it has, be they few or none. In training all ranks call it equally often; in evaluation
    nothing moves, unless `track_running_stats` is off, when the statistics are again those of all ranks.

    Gradients are those of the sum of the losses of all ranks, each with its `loss_weight` (1). The gradients of `weight` and
    `bias` are this rank's share: they become those of the whole batch when they are summed over the ranks, as data-parallel
    training does with all parameters.

    Its state dict is that of nn.BatchNorm. `comm` are the ranks; the other attributes are nn.BatchNorm's.
    """

    loss_weight = 1.0
    _is_compared = False

    def __init__(
        self,
        num_features: int,
        comm: AbstractCommunicator,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Arguments are those of nn.BatchNorm2d.

        Args:
            num_features: channels.
            comm: the ranks.
            eps: added to the variance.
            momentum: the share of the new batch in the running statistics; None for the mean over all batches.
            affine: whether there is a weight and a bias.
            track_running_stats: whether there are running statistics.
            device: of parameters and buffers.
            dtype: of parameters and buffers.

        Raises:
            InputError: no channels.
        """
        check_at_least(1, num_features=num_features)
        # torch's own arguments by position: nn.Module takes none, and AbstractSpanning comes before _BatchNorm.
        _BatchNorm.__init__(self, num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.comm = comm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize.

        Args:
            input: `(samples here, channels, ...)` of `(samples, channels, ...)`; samples here may be 0.

        Raises:
            InputError: another number of channels; a single value for each channel on all ranks together.
            CommError: another number of channels on another rank; CommTimeoutError, RankDiedError, ClosedError.
        """
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InputError(
                f"MultiNodeBatchNorm on rank {self.comm.rank}: input has the shape {tuple(input.shape)}; give "
                f"(samples, {self.num_features}, ...)"
            )
        return run_layer(self, input, batch=self._batch)

    def _batch(self) -> SharedBatch:
        comm, channels = self.comm, self.num_features
        if not self._is_compared:
            for rank, other in enumerate(comm.allgather_object(channels)):
                if other != channels:
                    raise CommError(
                        f"MultiNodeBatchNorm: rank {rank} has {other} channels and rank {comm.rank} has {channels}; all ranks "
                        "need the same network"
                    )
            self._is_compared = True
        sums = comm.attached(ShortSum, ShortSum)
        return SharedBatch(
            sums=sums,
            name="a MultiNodeBatchNorm",
            replica=comm.rank,
            replicas=comm.size,
            channels=channels,
            loss_weight=self.loss_weight,
        )


Module = TypeVar("Module", bound=nn.Module)


def create_mnbn_model(model: Module, comm: AbstractCommunicator) -> Module:
    """A copy of `model` with a `MultiNodeBatchNorm` in place of each nn.BatchNorm1d, 2d, 3d and nn.SyncBatchNorm.

    Everything else is a deep copy: values, settings, hooks, and what was shared in `model` is shared in the copy.

    Args:
        model: a network; a batch normalization by itself becomes a MultiNodeBatchNorm.
        comm: the ranks.

    Raises:
        ModelError: a batch normalization that does not know its channels yet, or with a forward of its own; names it.
    """
    memo: dict[int, Any] = {id(comm): comm}
    replaced: list[tuple[nn.Module, MultiNodeBatchNorm]] = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            _check(name, module)
            twin = memo[id(module)] = MultiNodeBatchNorm.__new__(MultiNodeBatchNorm)
            replaced.append((module, twin))
    # All twins are known before any is filled: a hook of one may refer to another, or to the model.
    for module, twin in replaced:
        twin.__dict__.update({**deepcopy(module.__dict__, memo), "comm": comm})
    copy: Module = deepcopy(model, memo)
    return copy


def _check(name: str, module: _BatchNorm) -> None:
    kind = type(module)
    where = f"{name or 'the model'} is a {kind.__name__}"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise ModelError(f"{where} that does not know its channels yet; run the model once, then convert it")
    if kind.forward is not _BatchNorm.forward and not isinstance(module, nn.SyncBatchNorm | MultiNodeBatchNorm):
        raise ModelError(f"{where} with a forward of its own, which the copy would lose; replace it by hand")
