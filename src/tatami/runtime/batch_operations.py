"""Operations that look at the whole batch, on ranks that have a part of it: dropout and batch normalization.

Dropout draws what the plain model would: every rank draws the noise of the whole batch and of all units from a generator in
the same state, and keeps its own part. The price is that the drawing itself is not split. Batch normalization takes the
statistics of the global batch, by one small sum over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from tatami.batch_statistics import NormSettings, SharedBatch, normalize
from tatami.errors import InputError
from tatami.runtime.context import ModuleContext, RankContext


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


def dropout(
    context: ModuleContext, x: torch.Tensor, p: float, shape: Shape, orders: Collection[tuple[int, ...]] = ()
) -> torch.Tensor:
    """`torch.nn.functional.dropout` in training, with the noise that the plain model would draw.

    Args:
        context: whose samples and units `x` has.
        x: (samples_here, ..., units_here), or any other order of axes.
        p: the probability of a zero.
        shape: what the axes of `x` are.
        orders: as far as they are known, those in which its axes are in memory where there are several samples: of a single one
            they cannot be seen.
    """
    if p == 1.0:
        return x * torch.zeros_like(x)
    if context.rank.draws_alone and x.is_cuda:
        return torch.nn.functional.dropout(x, p)
    return x * _noise(context, x, p, shape, order=order_of(x, orders))


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


@dataclass(frozen=True, kw_only=True)
class NormFacts:
    """A batch normalization in a followed program.

    Attributes:
        channels: what its channels are: units of a block, or the same on all ranks of the replica.
        layer: its name in the module; empty where it is not known.
    """

    channels: tuple[Factor, ...]
    layer: str = ""


def batch_norm(
    context: ModuleContext,
    facts: NormFacts,
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
        facts: which layer it is. What its momentum and eps are is asked of the layer: they may have changed since.
        x: (values_here, channels_here, ...).
        weight, bias, running_mean, running_var: (channels_here,); running statistics are updated.
        training, momentum, eps: torch's, as they were when the program was followed.

    Raises:
        InputError: the global batch has a single value for each channel, which has no variance; or `x` is a part of the samples
            here, cut out.
    """
    layer = context.layer(facts.layer) if facts.layer and context.layer is not None else None
    if isinstance(layer, _BatchNorm):
        eps, tracked = layer.eps, layer.num_batches_tracked
        if layer.momentum is not None:
            momentum = layer.momentum
        elif training and tracked is not None:
            momentum = 1.0 / float(tracked)
    if context.rank.comm is None or not training:
        if not x.shape[1]:
            return x  # torch refuses to normalize no channel
        return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    batch = shared_batch(context, facts.channels, x, name=f"{context.name}.{facts.layer}".strip("."))
    settings = NormSettings(running_mean, running_var, momentum, eps)
    return normalize(x, weight, bias, settings=settings, batch=batch)


def shared_batch(context: ModuleContext, channels: tuple[Factor, ...], x: torch.Tensor, *, name: str) -> SharedBatch:
    """What this rank has of the batch and of the channels that `x` (values_here, channels_here, ...) is a part of.

    Raises:
        InputError: `x` is a part of the samples here, cut out, of which no other rank has the like.
    """
    rank = context.rank
    _refuse_cut_out(rank, x, name)
    has_units = any(isinstance(factor, UnitFactor) for factor in channels)
    is_summed = rank.sums_statistics and not rank.local_statistics
    return SharedBatch(
        sums=rank.sums if is_summed else None,
        name=f"layer {name}",
        # A pass without gradients may come before any batch was announced.
        counts=rank.mine.size > 0 or (not rank.samples and rank.index is not None and not rank.stands_in),
        gives=rank.speaks,
        replica=rank.index,
        replicas=rank.replicas,
        positions=_positions(context, channels).numpy() if has_units and is_summed else None,
        channels=_length(rank, channels, x.shape[1]) if has_units else x.shape[1],
        loss_weight=rank.weight,
        again=False,
        waits=rank.waits,
    )


def _refuse_cut_out(rank: RankContext, x: torch.Tensor, name: str) -> None:
    """Refuse a part of the samples, as ghost batch normalization takes them: `for part in x.split(8)`.

    The plain model cuts the whole batch into parts, a rank its own samples. Several views of all samples that lie one after the
    other may be cut apart again.
    """
    if x._base is None or x.grad_fn is None or rank.local_statistics:
        return
    kind = x.grad_fn.name()
    sizes = getattr(x.grad_fn, "_saved_self_sym_sizes", None)
    if not sizes or not kind.startswith(("Split", "Slice", "Narrow")) or getattr(x.grad_fn, "_saved_dim", 0) != 0:
        return
    here, whole = rank.seen.size, int(sizes[0])
    is_cut = x.shape[0] < whole or kind.startswith("Split")
    if is_cut and here and (whole <= here or x.shape[0] % here):
        raise InputError(
            f"layer {name} normalizes {x.shape[0]} rows that are cut out of the {here} samples of this rank, so its statistics "
            "would depend on how the batch is laid over the ranks. Ghost batch normalization is not exact on several ranks: "
            "normalize all samples at once, or give tatami.tile batch_norm='local'"
        )


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


# -- parts of what is whole ---------------------------------------------------------------------------------------------------


def order_of(x: torch.Tensor, seen: Collection[tuple[int, ...]] = ()) -> tuple[int, ...]:
    """The axes of `x` in the order of memory, the outermost first; of those that were `seen`, the one that fits.

    Raises:
        InputError: several do.
    """
    strides = x.stride()
    fits = [
        order
        for order in seen
        if len(order) == x.dim() and not any(strides[a] < strides[b] for a, b in pairwise(a for a in order if x.shape[a] > 1))
    ]
    if len(fits) > 1:
        raise InputError(
            f"random numbers are drawn for a tensor of shape {tuple(x.shape)} whose order in memory is not known. Give each "
            "replica and micro-batch two samples or more"
        )
    return fits[0] if fits else tuple(sorted(range(x.dim()), key=lambda axis: (-strides[axis], axis)))


def _noise(context: ModuleContext, x: torch.Tensor, p: float, shape: Shape, *, order: Sequence[int]) -> torch.Tensor:
    rank = context.rank
    for factors, here in zip(shape, x.shape, strict=True):
        if not rank.is_whole and factors == ("samples",) and here != rank.seen.size:
            raise InputError(
                f"dropout got {here} rows where {rank.mine.size} of {rank.samples} samples are this rank's. Pass what "
                "model.local(...) returned, and keep the samples on the first axis of what dropout is applied to"
            )
    if rank.is_whole:
        whole = list(x.shape)
    else:
        whole = [_length(rank, factors, here) for factors, here in zip(shape, x.shape, strict=True)]
    # All ranks draw the noise of the whole on their CPUs, whose numbers are the same on all of them; cards have others.
    # torch draws in the order of memory, and so must we: the outermost axis in memory first.
    noise = torch.empty([whole[axis] for axis in order], dtype=x.dtype, device="cpu").bernoulli_(
        1.0 - p, generator=rank.generator
    )
    noise = noise.permute([order.index(axis) for axis in range(x.dim())]).div_(1.0 - p)
    if rank.is_whole:
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
    """Length of an axis of the whole tensor."""
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
