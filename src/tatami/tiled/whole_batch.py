"""Operations that look at the whole batch, on ranks that have a part of it: dropout and batch normalization.

Dropout draws what the plain model would: every rank draws the noise of the whole batch and of all units from a generator in
the same state, and keeps its own part. The price is that the drawing itself is not split. Batch normalization takes the
statistics of the global batch, by one small sum over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from tatami.errors import InputError
from tatami.tiled.context import ModuleContext, RankContext

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class UnitFactor:
    """The units of a block as a part of an axis: each of `total` units has `inner` elements in every run from `start`."""

    block: int
    total: int
    runs: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return self.total * sum(inner for _, inner in self.runs)


Factor: TypeAlias = 'int | UnitFactor | Literal["samples"] | None'
"""A part of an axis: a fixed length, units, the samples, or (alone on its axis) any length."""
Shape: TypeAlias = tuple[tuple[Factor, ...], ...]


def dropout(context: ModuleContext, x: torch.Tensor, p: float, shape: Shape) -> torch.Tensor:
    """`torch.nn.functional.dropout` in training, with the noise that the plain model would draw.

    Args:
        context: whose samples and units `x` has.
        x: (samples_here, ..., units_here), or any other order of axes.
        p: the probability of a zero.
        shape: what the axes of `x` are.
    """
    if p == 1.0:
        return x * torch.zeros_like(x)
    if context.rank.comm is None and x.is_cuda:  # no other rank must draw the same
        return torch.nn.functional.dropout(x, p)
    return x * _noise(context, x, p, shape)


def attention(
    context: ModuleContext,
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the dropout that the plain model would draw.

    Args:
        context: whose samples and units there are.
        shape: what the axes of the attention's weights are: (samples, heads, queries, keys).
        q, k, v: (samples_here, heads_here, tokens, size).
        attn_mask, dropout_p, is_causal, scale, enable_gqa: torch's.
    """
    if enable_gqa:
        repeats = q.shape[-3] // max(k.shape[-3], 1)
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    weights = (q * root) @ (k * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        # As torch does: a sum keeps nothing for its backward pass.
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=weights.dtype).masked_fill_(~attn_mask, -math.inf)
        weights = weights + attn_mask
    weights = torch._safe_softmax(weights, -1)
    return dropout(context, weights, dropout_p, shape) @ _alone(v)


def batch_norm(
    context: ModuleContext,
    channels: tuple[Factor, ...],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm` with the statistics of the global batch. Collective over all ranks of the model.

    Args:
        context: whose samples and units `x` has.
        channels: what the channels are: units of a block, or the same on all ranks of the column.
        x: (samples_here, channels_here, ...).
        weight, bias, running_mean, running_var: (channels_here,); running statistics are updated.
        training, momentum, eps: torch's.

    Raises:
        InputError: the global batch has a single value for each channel, which has no variance.
    """
    rank = context.rank
    if rank.comm is None or not training:
        if not x.shape[1]:
            return x  # torch refuses to normalize no channel
        return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    values = x.float() if x.dtype in _HALVES else x
    over = [0, *range(2, x.dim())]
    per_sample = math.prod(x.shape[2:])
    total = rank.samples * per_sample
    if total == 1:
        raise InputError("batch normalization needs more than one value for each channel; the global batch has one sample")
    if rank.mine.size:
        variance, mean = torch.var_mean(values, over, correction=0)
    else:
        mean = variance = values[:0].sum(over)  # not of a sample that stands in
    units = channels[0] if channels and isinstance(channels[0], UnitFactor) else None
    positions = None if units is None else _unit_positions(context, units).to(x.device)
    num_channels = x.shape[1] if units is None else units.size
    told = _Everywhere.apply(torch.stack((mean, variance)), rank, positions, num_channels)  # type: ignore[no-untyped-call]
    # Means and variances of parts, put together: Chan, Golub, LeVeque: Algorithms for computing the sample variance (1983),
    # equation 2.1. Sums of squares would lose the digits in which mean and values agree.
    shares = _column([width / rank.samples for width in rank.widths], values)
    means, variances = told[:, 0], told[:, 1]
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean) ** 2)).sum(0)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    wide = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(wide), values, scale.view(wide)).to(x.dtype)


def mean_loss(
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    *smoothing: float,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` or `nll_loss`, in a program as in Python, where means can be counted.

    Args:
        function: which of them.
        input, target, weight, ignore_index, smoothing: torch's.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
    """
    named = {"label_smoothing": smoothing[0]} if smoothing else {}
    reduced = ("none", "mean", "sum")[reduction]
    return function(input, target, weight=weight, ignore_index=ignore_index, reduction=reduced, **named)


class _Everywhere(torch.autograd.Function):
    """What every column has for this rank's channels: (2, channels_here) to (columns, 2, channels_here).

    Each rank adds what it has to a table of all columns and channels that is 0 elsewhere. Of ranks that have the same (channels
    that are repeated down a column) one speaks. Backward is the same way back: an entry of the table was read by the owners of
    its channel in every column, and their gradients are summed.
    """

    @staticmethod
    def forward(
        ctx: Any, mine: torch.Tensor, rank: RankContext, positions: torch.Tensor | None, num_channels: int
    ) -> torch.Tensor:
        assert rank.comm is not None
        ctx.rank, ctx.positions, ctx.num_channels = rank, positions, num_channels
        ctx.has_samples = rank.mine.size > 0
        table = mine.new_zeros(len(rank.widths), 2, num_channels)
        if rank.index is not None:
            if positions is not None:
                table[rank.index, :, positions] = mine
            elif rank.speaks:
                table[rank.index] = mine
        rank.comm.allreduce(table)
        return table if positions is None else table[:, :, positions]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rank: RankContext = ctx.rank
        assert rank.comm is not None
        table = grad.new_zeros(len(rank.widths), 2, ctx.num_channels)
        if ctx.has_samples and ctx.positions is not None:
            table[:, :, ctx.positions] = grad
        elif ctx.has_samples and rank.speaks:
            table.copy_(grad)
        rank.comm.allreduce(table)
        mine = table[rank.index] if rank.index is not None else torch.zeros_like(table[0])
        return mine if ctx.positions is None else mine[:, ctx.positions], None, None, None


# -- parts of what is whole ---------------------------------------------------------------------------------------------------


def _noise(context: ModuleContext, x: torch.Tensor, p: float, shape: Shape) -> torch.Tensor:
    rank = context.rank
    for factors, here in zip(shape, x.shape, strict=True):
        if rank.comm is not None and factors == ("samples",) and here != rank.seen.size:
            raise InputError(
                f"dropout got {here} rows where {rank.mine.size} of {rank.samples} samples are this rank's. Pass what "
                "model.local(...) returned, and keep the samples on the first axis of what dropout is applied to"
            )
    if rank.comm is None:
        whole = list(x.shape)
    else:
        whole = [_length(rank, factors, here) for factors, here in zip(shape, x.shape, strict=True)]
    # All ranks draw the noise of the whole on their CPUs, whose numbers are the same on all of them; cards have others.
    # torch draws in the order of memory, and so must we: the outermost axis in memory first.
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda axis: (-strides[axis], axis))
    noise = torch.empty([whole[axis] for axis in order], dtype=x.dtype, device="cpu").bernoulli_(
        1.0 - p, generator=rank.generator
    )
    noise = noise.permute([order.index(axis) for axis in range(x.dim())]).div_(1.0 - p)
    if rank.comm is None:
        return noise.to(x.device)
    for axis, factors in enumerate(shape):
        if factors == ("samples",):
            noise = noise.narrow(axis, rank.seen.start, rank.seen.size)
        elif any(factor == "samples" or isinstance(factor, UnitFactor) for factor in factors):
            noise = noise.index_select(axis, _positions(context, factors))
    return _alone(noise).to(x.device)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is kept for backward, without what it is a view of: the noise of the whole batch, or a packed qkv."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def _length(rank: RankContext, factors: tuple[Factor, ...], here: int) -> int:
    """Of an axis of the whole."""
    length = 1
    for factor in factors:
        if factor is None:
            return here
        length *= rank.samples if factor == "samples" else factor.size if isinstance(factor, UnitFactor) else factor
    return length


def _positions(context: ModuleContext, factors: tuple[Factor, ...]) -> torch.Tensor:
    """Where on an axis of the whole the elements that are here lie."""
    positions = torch.zeros(1, dtype=torch.int64, device="cpu")
    for factor in factors:
        if isinstance(factor, UnitFactor):
            size, inside = factor.size, _unit_positions(context, factor)
        elif factor == "samples":
            size = context.rank.samples
            inside = _range(context.rank.seen.start, context.rank.seen.stop)
        else:
            assert factor is not None
            size, inside = factor, _range(0, factor)
        positions = (positions.view(-1, 1) * size + inside).view(-1)
    return positions


def _unit_positions(context: ModuleContext, factor: UnitFactor) -> torch.Tensor:
    span = context.units[factor.block]()
    return torch.cat([_range(start + span.start * inner, start + span.stop * inner) for start, inner in factor.runs])


def _range(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop, dtype=torch.int64, device="cpu")


def _column(numbers: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device="cpu").to(like.device).view(-1, 1)
