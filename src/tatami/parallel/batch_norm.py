"""Batch normalization with the statistics of the global batch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tatami import functions
from tatami.comm.base import AbstractCommunicator
from tatami.errors import CommError, InputError, ModelError
from tatami.inputs import check_at_least
from tatami.parallel.spanning import AbstractSpanning

HALVES = (torch.float16, torch.bfloat16)


class MultiNodeBatchNorm(AbstractSpanning, _BatchNorm):
    """nn.BatchNorm1d, 2d or 3d over the batches of all ranks: outputs, gradients and running statistics are those of one
    process with the whole batch.

    Each rank counts with the samples it has, be they few or none. In training all ranks call it equally often; in evaluation
    nothing moves, unless `track_running_stats` is off, when the statistics are again those of all ranks.

    Gradients are those of the sum of the losses of all ranks. The gradients of `weight` and `bias` are this rank's share: they
    become those of the whole batch when they are summed over the ranks, as data-parallel training does with all parameters.

    Its state dict is that of nn.BatchNorm. `comm` are the ranks; the other attributes are nn.BatchNorm's.
    """

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
        if not self.training and self.running_mean is not None and self.running_var is not None:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        values = input.float() if input.dtype in HALVES else input
        mean, variance, total = self._statistics(values)
        if total == 1:
            raise InputError(
                "MultiNodeBatchNorm: all ranks together have one value for each channel, which has no variance; give more "
                "samples"
            )
        if self.training and self.running_mean is not None:
            self._track(mean, variance, total)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        wide = (1, -1, *[1] * (input.dim() - 2))
        return torch.addcmul(shift.view(wide), values, scale.view(wide)).to(input.dtype)

    def _statistics(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Mean and variance of each channel over all ranks, `(channels,)` both, and of how many values they are.

        Each rank tells its mean, its variance and its count. The sums of values and of squares would be fewer to add up, but
        their difference loses the digits in which mean and values agree. See Chan, Golub, LeVeque: Algorithms for computing the
        sample variance (1983), equation 2.1.
        """
        over = [0, *range(2, values.dim())]
        count = values.numel() // self.num_features
        if count:
            variance, mean = torch.var_mean(values, over, correction=0)
        else:
            mean = variance = values.sum(over)
        told = functions.allgather(
            (torch.stack((mean, variance)), torch.tensor(count, dtype=torch.int64, device="cpu")), self.comm
        )
        for rank, (both, _) in enumerate(told):
            if both.shape[1] != self.num_features:
                raise CommError(
                    f"MultiNodeBatchNorm: rank {rank} has {both.shape[1]} channels and rank {self.comm.rank} has "
                    f"{self.num_features}; all ranks need the same network"
                )
        total = sum(int(number) for _, number in told)
        shares = torch.tensor([int(number) / max(total, 1) for _, number in told], dtype=values.dtype, device="cpu")
        shares = shares.to(values.device).view(-1, 1)
        means, variances = torch.stack([both.to(values) for both, _ in told], dim=1)
        mean = (shares * means).sum(0)
        return mean, (shares * (variances + (means - mean) ** 2)).sum(0), total

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if not total:
            return
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * total / (total - 1)).to(self.running_var.dtype), share)


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
