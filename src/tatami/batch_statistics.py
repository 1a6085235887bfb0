"""Batch normalization over a batch that several ranks have together: one sum of short vectors in each direction.

    forward      every rank sums, of each channel, its values and their squares; with the number of values that is the mean and
                 the variance of all ranks' values
    backward     every rank sums, of each channel, the gradients of its outputs, and those times the normalized values

Elsewhere torch's fused operations do the work, in the form in which they normalize by given statistics. torch's own statistics
on the CPU go through the values one by one: of 16 x 32 x 32 x 32 of them `torch.var_mean` takes 3.0 ms of a core and
`batch_norm_update_stats` 0.9 ms; the two passes here (the mean, then the squares around it) take 0.17 ms. They go through large
batches part by part: of 64 x 64 x 56 x 56 values, new memory for the differences of all would take four times as long. Where no
other rank has any, torch's own layer is faster for up to half a million values, and for tables of (values, channels): 11 x 128
x 4 x 4 of them take 90 us forward and backward in place of 150, 11 x 16 x 32 x 32 of them 550 in place of 750.

Squares are summed around the mean of each rank. What ranks tell each other are sums in double precision, which keep the digits
of single precision however far from zero the mean is. Values in double precision would lose digits in which mean and values
agree; of those each rank tells its own mean and squares, and all put them together (Chan, Golub, LeVeque: Algorithms for
computing the sample variance, 1983, equation 2.1).

What is computed of the sums, a few numbers for each channel, is computed by numpy in host memory. Between two layers a call of
torch takes 5 to 10 us, however little it does, and there were 40 of them in a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _BatchNorm

from tatami.comm.short_sum import ShortSum, Vector
from tatami.errors import CommError, CommTimeoutError, InputError

HALVES = (torch.float16, torch.bfloat16)
_PART_ELEMENTS = 1 << 20
_FEW_ELEMENTS = 1 << 19
"""Up to so many values torch's own layer is faster, in all."""
Array = NDArray[np.floating[Any]]
_backward = torch.ops.aten.native_batch_norm_backward
"""In its form for evaluation it takes the sums over the values here, whatever mean and variance it is given."""


@dataclass(frozen=True, kw_only=True)
class SharedBatch:
    """What this rank has of a batch and of its channels.

    Attributes:
        sums: over all ranks; None where the values here are the whole batch.
        name: of the layer, for errors, and by which ranks make sure that they are all at the same layer.
        counts: whether the values here are of samples of the batch; not those of a sample that stands in.
        gives: whether this rank tells of channels that other ranks of its replica have as well: one of them does.
        replica: the number of this rank's replica; None where it is in none.
        replicas: how many there are.
        positions: (channels_here,) which of all channels are here; None: all are.
        channels: how many there are in all.
        loss_weight: by which the gradients here count in those of all ranks. 1 where every rank's loss is its part of the sum
            of all losses. Where it is the mean over the n samples here, of N: n / N. The gradients that come out are those of
            the loss here: weighed by `loss_weight`, they are those of the whole batch.
        again: whether gradients of gradients are computed, which need the loss here to be this rank's part of the sum of all.
        waits: called with True before, and with False after the ranks wait for each other.
    """

    sums: ShortSum | None
    name: str
    counts: bool = True
    gives: bool = True
    replica: int | None = 0
    replicas: int = 1
    positions: NDArray[np.int64] | None = None
    channels: int
    loss_weight: float = 1.0
    again: bool = True
    waits: Callable[[bool], object] | None = None

    def summed(self, table: torch.Tensor, *, what: str) -> torch.Tensor:
        """The sum over the replicas: (lines, channels_here) of this rank to (lines, channels_here), in double precision."""
        if self.sums is None:
            return table.double() if self.counts else torch.zeros_like(table, dtype=torch.float64)
        return torch.from_numpy(self.summed_lines(*on_host(table)[0], what=what).copy()).to(table.device)

    def summed_lines(self, *own: Array, what: str) -> Vector:
        """As `summed`, in host memory, which holds the sum until the next one."""
        assert self.sums is not None
        shape = len(own), self.channels
        self.write(self.sums.room(math.prod(shape)).reshape(shape), *own)
        return self.read(self.run(what).reshape(shape))

    def write(self, room: Vector, *own: Array) -> None:
        """Lines of (channels_here,) where they belong in (lines, channels), and zeros where this rank has nothing to tell."""
        if self.positions is None and self.gives and self.counts:
            for line, each in zip(room, own, strict=True):
                line[:] = each
            return
        room[:] = 0.0
        if self.counts and self.positions is not None:
            for line, each in zip(room, own, strict=True):
                line[self.positions] = each

    def read(self, table: Vector) -> Vector:
        """(lines, channels) to (lines, channels_here)."""
        return table if self.positions is None else table[:, self.positions]

    def run(self, what: str) -> Vector:
        assert self.sums is not None
        if self.waits is not None:
            self.waits(True)
        try:
            return self.sums.run(f"{self.name}, {what}")
        except CommTimeoutError as error:
            error.add_note(
                f"in the {what} of {self.name}, a batch normalization over all ranks, which all ranks must call equally often"
            )
            raise
        except CommError as error:
            raise CommError(
                f"{error}. Batch normalization over all ranks must be called equally often, and in the same order, on all of "
                "them: not once for each part of a rank's samples (x.split(8)), nor only where some samples are"
            ) from error
        finally:
            if self.waits is not None:
                self.waits(False)


class NormSettings(NamedTuple):
    """What a layer says beside its tensors; running statistics are updated where they are given."""

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    momentum: float
    eps: float


def normalize(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *, settings: NormSettings, batch: SharedBatch
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm` in training, over the values of all ranks. Collective.

    Args:
        x: (values_here, channels_here, ...); values_here need not be equal on all ranks, and may be 0.
        weight, bias: (channels_here,).
        settings: running statistics (channels_here,), momentum and eps.
        batch: what of the batch is here.

    Raises:
        InputError: the batch has a single value for each channel, which has no variance.
        CommError: another rank is at another layer.
        CommTimeoutError, RankDiedError: a rank did not come.
    """
    if _suits_torch(x, weight, bias, batch=batch):
        running_mean, running_var, momentum, eps = settings
        return F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    output: torch.Tensor = _Normalize.apply(x, weight, bias, settings, batch)  # type: ignore[no-untyped-call]
    return output


def _suits_torch(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *, batch: SharedBatch) -> bool:
    is_alone = batch.sums is None and batch.counts and x.numel() > x.shape[1]
    is_plain = x.dtype not in HALVES and all(each is None or each.dtype is x.dtype for each in (weight, bias))
    return is_alone and is_plain and (x.dim() == 2 or x.numel() <= _FEW_ELEMENTS)


def run_layer(layer: _BatchNorm, x: torch.Tensor, *, batch: Callable[[], SharedBatch | None]) -> torch.Tensor:
    """The forward pass of a batch normalization, with the statistics of `batch()` where it takes any.

    Args:
        layer: its mode, settings and tensors are those that it has just now.
        x: (values_here, channels, ...).
        batch: asked for where statistics are taken; None: torch's own.
    """
    takes_statistics = layer.training or layer.running_mean is None or layer.running_var is None
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    tracks = not layer.training or layer.track_running_stats
    running = (layer.running_mean, layer.running_var) if tracks else (None, None)
    shared = batch() if takes_statistics else None
    if shared is None:
        return F.batch_norm(x, *running, layer.weight, layer.bias, takes_statistics, momentum, layer.eps)
    settings = NormSettings(*running, momentum, layer.eps) if layer.training else NormSettings(None, None, 0.0, layer.eps)
    return normalize(x, layer.weight, layer.bias, settings=settings, batch=shared)


class _Statistics(NamedTuple):
    """Statistics of each channel here, over all ranks: in the precision of the computation, and the variance in host memory."""

    mean: torch.Tensor
    variance: torch.Tensor
    total: float
    host_variance: Array | None = None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        settings: NormSettings,
        batch: SharedBatch,
    ) -> torch.Tensor:
        values = x.float() if x.dtype in HALVES else x
        scale, shift = (None if each is None else each.to(values.dtype) for each in (weight, bias))
        ctx.save_for_backward(x, weight, bias)
        found = _statistics(values, batch)
        if found.total:
            if settings.running_mean is not None:
                uncounted(settings.running_mean).lerp_(found.mean.to(settings.running_mean.dtype), settings.momentum)
            if settings.running_var is not None:
                unbiased = found.variance * (found.total / (found.total - 1))
                uncounted(settings.running_var).lerp_(unbiased.to(settings.running_var.dtype), settings.momentum)
        ctx.facts = found, settings.eps, batch
        if not x.numel():
            return x.clone()
        mean, variance = found.mean, found.variance
        output: torch.Tensor = torch.native_batch_norm(values, scale, shift, mean, variance, False, 0.0, settings.eps)[0]
        return output.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        found, eps, batch = ctx.facts
        mean, variance, total, _ = found
        is_wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a gradient of this gradient may be asked for
            if not batch.again and batch.sums is not None:
                raise InputError(
                    "create_graph=True: gradients of gradients do not pass batch normalization over the global batch. Leave "
                    "create_graph out, or use another norm"
                )
            inputs = [each for each, wanted in zip((x, weight, bias), is_wanted, strict=False) if wanted]
            output = _composed(x, weight, bias, found=found, eps=eps, batch=batch)
            grads = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
            return (*(next(grads) if wanted else None for wanted in is_wanted[:3]), None, None)
        values, given = (each.float() if each.dtype in HALVES else each for each in (x, grad))
        if batch.sums is None and batch.counts and x.numel():  # all values are here: torch's own is faster
            scale = None if weight is None else weight.to(values.dtype)
            saved = mean, torch.rsqrt(variance + eps)
            results = _backward(given, values, scale, None, None, *saved, True, eps, list(is_wanted[:3]))
            pairs = zip(results, (x, weight, bias), strict=True)
            return (*(None if of is None or like is None else of.to(like.dtype) for of, like in pairs), None, None)
        host_variance = on_host(variance)[0] if found.host_variance is None else found.host_variance
        inverse = 1 / np.sqrt(host_variance + eps)
        if x.numel():
            # Kernels of the CPU take mean and variance as running statistics, those of CUDA as what the forward pass has saved;
            # and those want a weight, which these two gradients do not depend on.
            known = mean, mean, variance, mean, variance if mean.device.type == "cpu" else _like(mean, inverse)
            _, of_weight, of_bias = _backward(given, values, *known, False, eps, [False, True, True])
        else:
            of_weight = of_bias = torch.zeros_like(mean)
        own = [None if each is None else of.to(each.dtype) for each, of in ((weight, of_weight), (bias, of_bias))]
        if not is_wanted[0]:
            return None, *own, None, None
        share, sums = batch.loss_weight, [each.astype(np.float64) for each in on_host(of_bias, of_weight)]
        if batch.sums is not None:
            over_ranks = batch.summed_lines(*(share * each for each in sums), what="backward pass")
            sums = [each / share if share else each for each in over_ranks]
        if not batch.counts or not share or not x.numel():
            return torch.zeros_like(x), *own, None, None
        factor = inverse if weight is None else inverse * on_host(weight)[0]
        level, slope = sums[0] * factor / -total, sums[1] * factor * inverse / -total
        wide = _axes(values)[1]
        around = mean.view(wide)
        scale, less, bend = _like(mean, np.stack((factor, level, slope))).view(3, *wide)
        whole = torch.empty_like(values)
        for part, gradient, result in _parts(values, given, whole):
            centered = torch.sub(part, around, out=result)
            torch.addcmul(less, centered, bend, out=result).addcmul_(gradient, scale)
        return whole.to(x.dtype), *own, None, None


def on_host(*tensors: torch.Tensor) -> list[Array]:
    """The values of tensors; on a CPU in the same memory, but for half precision."""
    return [(each.float() if each.dtype in HALVES else each).detach().cpu().numpy() for each in tensors]


def _like(tensor: torch.Tensor, values: Array) -> torch.Tensor:
    """Values in the precision of `tensor`, where it is."""
    return torch.from_numpy(values).to(tensor.device, tensor.dtype)


def _axes(values: torch.Tensor) -> tuple[list[int], tuple[int, ...]]:
    """The axes that statistics are taken over, and the shape of a number for each channel."""
    return [0, *range(2, values.dim())], (1, -1, *[1] * (values.dim() - 2))


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of tensors (values_here, channels_here, ...), one after the other, that a processor's cache can hold."""
    first = tensors[0]
    if first.numel() <= _PART_ELEMENTS:
        yield tensors
        return
    yield from zip(*(torch.split(each, max(1, _PART_ELEMENTS // first[:1].numel())) for each in tensors), strict=True)


def _statistics(values: torch.Tensor, batch: SharedBatch) -> _Statistics:
    count = math.prod(values.shape[:1] + values.shape[2:]) if batch.counts else 0
    over, wide = _axes(values)
    if count:
        mean = values.mean(over)
        around = mean.view(wide)
        squares = reduce(torch.add, (torch.sub(part, around).square_().sum(over) for (part,) in _parts(values)))
    else:
        mean = squares = values.new_zeros(values.shape[1])
    if batch.sums is None:
        _check(count, batch)
        return _Statistics(mean, squares.div_(count) if count else squares, count)
    host_mean, host_squares = on_host(mean, squares)
    if values.dtype is torch.float64:
        whole, variance, total = _put_together(host_mean, host_squares, count, batch)
    else:
        whole, variance, total = _added_up(host_mean.astype(np.float64), host_squares, count, batch)
    mean, here = _like(mean, np.stack((whole, variance)))
    return _Statistics(mean, here, total, variance)


def _added_up(mean: Vector, squares: Array, count: int, batch: SharedBatch) -> tuple[Vector, Vector, float]:
    """Mean and variance of each channel, and the number of values, from the sums of values and squares over the replicas."""
    assert batch.sums is not None
    room = batch.sums.room(1 + 2 * batch.channels)
    room[0] = count if batch.gives else 0
    # Exactly `count` times the mean that the squares are around: of the sum itself, rounded, the variance would lose digits.
    sums = mean * count
    batch.write(room[1:].reshape(2, -1), sums, squares + sums * mean)
    table = batch.run("forward pass")
    total = float(table[0])
    _check(total, batch)
    mean, squares = batch.read(table[1:].reshape(2, -1)) / max(total, 1.0)
    return mean, np.maximum(squares - mean * mean, 0.0), total


def _put_together(mean: Array, squares: Array, count: int, batch: SharedBatch) -> tuple[Vector, Vector, float]:
    """As `_added_up`, from the mean and the squares of each replica, where those have double precision as well."""
    assert batch.sums is not None
    shape = batch.replicas, 1 + 2 * batch.channels
    room = batch.sums.room(math.prod(shape)).reshape(shape)
    room[:] = 0.0
    if count and batch.replica is not None:
        room[batch.replica, 0] = count if batch.gives else 0
        batch.write(room[batch.replica, 1:].reshape(2, -1), mean, squares)
    table = batch.run("forward pass").reshape(shape)
    counts = table[:, :1]
    total = float(counts.sum())
    _check(total, batch)
    means, spreads = (batch.read(each) for each in np.split(table[:, 1:], 2, axis=1))
    whole = (counts * means).sum(0) / max(total, 1.0)
    return whole, (spreads + counts * (means - whole) ** 2).sum(0) / max(total, 1.0), total


def _check(total: float, batch: SharedBatch) -> None:
    if total == 1:
        raise InputError(
            f"{batch.name}: all ranks together have one value for each channel, which has no variance; give more samples"
        )


def uncounted(running: torch.Tensor) -> torch.Tensor:
    """A running statistic, to be changed without autograd's notice.

    torch's own layer hands it to its backward pass, which does not read it, but refuses one that has changed since.
    """
    return running.data


# -- gradients of gradients ---------------------------------------------------------------------------------------------------


def _composed(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    found: _Statistics,
    eps: float,
    batch: SharedBatch,
) -> torch.Tensor:
    """The same output, of operations that torch differentiates as often as it likes. Sums are around the mean that is known."""
    values = x.float() if x.dtype in HALVES else x
    over, wide = _axes(values)
    known = found.mean.double()
    around = values.double() - known.view(wide)
    sums = _OverReplicas.apply(torch.stack((around.sum(over), (around * around).sum(over))), batch, 1.0, 1.0)  # type: ignore[no-untyped-call]
    off, squares = sums / max(found.total, 1.0)
    scale = torch.rsqrt(squares - off * off + eps)
    scale = scale if weight is None else scale * weight
    output: torch.Tensor = (around - off.view(wide)) * scale.view(wide)
    return (output if bias is None else output + bias.view(wide)).to(x.dtype)


class _OverReplicas(torch.autograd.Function):
    """`after` times the sum over the replicas of `before` times what each has.

    Gradients are those of each rank's own loss: what comes back is summed with the weights of the losses, and divided by the
    weight of the loss here.
    """

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, batch: SharedBatch, before: float, after: float) -> torch.Tensor:
        ctx.facts = batch, before, after
        summed = batch.summed(table * before, what="gradient of the backward pass")
        return summed * after

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        batch, before, after = ctx.facts
        weight = batch.loss_weight
        back: torch.Tensor = _OverReplicas.apply(  # type: ignore[no-untyped-call]
            grad, batch, after * weight, before / weight if weight else 0.0
        )
        return back, None, None, None
