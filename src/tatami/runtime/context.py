"""What a part of the network asks when a rank runs it: which replica, which samples, which units are here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.comm.short_sum import ShortSum
from tatami.errors import ModelError
from tatami.runtime.phases import IterationPhase
from tatami.runtime.rows import UnitRuns, cut_units
from tatami.runtime.tensor_parallel import ReplicaComm, copy_to_replica, sum_over_replica
from tatami.tiling import Span


class StandsIn:
    """What stands in place of a module's `forward`, as an attribute of that module, which keeps its class, names and hooks."""

    def __deepcopy__(self, memo: Any) -> Never:
        raise ModelError(
            "the layers of a tiled model hold its ranks' communicator and a part of the weights, and cannot be copied. Keep an "
            "average of the weights by tatami.train.WeightAverage, and write whole weights by tatami.train.save_model"
        )

    def __reduce_ex__(self, protocol: Any) -> Never:
        raise ModelError(
            "the layers of a tiled model cannot be pickled: tatami.train.save_model and whole_state_dict give whole weights"
        )


@dataclass(kw_only=True)
class RankContext:
    """What all parts of a tiled model share; the model changes it with every batch and every re-tiling.

    The layers get it once, when the model is made, and read in each forward pass what `TiledModel.local` wrote last: of a pass
    over 40 samples, of which this rank has 8 to 19, a layer finds `samples == 40` and `mine == Span(8, 20)` here.

    Attributes:
        replica: the ranks that share this rank's samples.
        comm: all ranks of the model; None where the rank is alone.
        generator: of random layers, in the same state on every rank.
        samples: of the global batch.
        mine: those of this rank.
        widths: samples of the global batch, replica by replica.
        index: the number of this rank's replica; None where it has no tile.
        speaks: whether this rank is the one that counts what all ranks of its replica have.
        stands_in: whether the forward pass is over a sample that stands in, because none is this rank's (see `standing_in`).
        sums: of short vectors over all ranks; None where the rank is alone.
        replicas: how many there are.
        sums_statistics: whether statistics of the batch are summed over the ranks: not where all of them see the whole batch.
        local_statistics: whether every replica takes the statistics of its own samples instead.
        draws_alone: whether no other rank must draw the same as this one: not where there are other stages.
        weight: of this rank's gradients in the sum over the replicas, for the forward pass that runs (see `gradient_sums`).
    """

    replica: ReplicaComm
    comm: AbstractCommunicator | None
    generator: torch.Generator
    samples: int = 0
    mine: Span = field(default_factory=lambda: Span(0, 0))
    widths: tuple[int, ...] = ()
    index: int | None = None
    speaks: bool = False
    stands_in: bool = False
    draws_alone: bool = False
    weight: float = 1.0
    sums: ShortSum | None = None
    replicas: int = 1
    sums_statistics: bool = False
    local_statistics: bool = False
    _resumes: IterationPhase = IterationPhase.OUTSIDE

    def waits(self, begins: bool) -> None:
        """Told before and after this rank waits for all others in the midst of a pass: that is no time of its own."""
        phases = self.replica.phases
        if begins:
            self._resumes = phases.current
        if self._resumes is not IterationPhase.OUTSIDE:
            phases.enter(IterationPhase.TENSOR_PARALLEL if begins else self._resumes)

    @property
    def is_whole(self) -> bool:
        """Whether the forward pass is over the whole batch, on a rank that is alone."""
        return self.comm is None and self.mine.size == self.samples

    @property
    def seen(self) -> Span:
        """The samples that the forward pass is over; one that stands in draws what the first of the batch does."""
        return Span(0, 1) if self.stands_in else self.mine


@dataclass(frozen=True, kw_only=True)
class ModuleContext:
    """What one module of the network asks.

    Attributes:
        rank: what all modules share.
        units: for each block of the module, the units that are here.
        name: of the module.
        layer: gives a layer inside of the module by its name.
    """

    rank: RankContext
    units: Sequence[Callable[[], Span]] = ()
    name: str = ""
    layer: Callable[[str], nn.Module] | None = None


def enter(context: ModuleContext, x: torch.Tensor) -> torch.Tensor:
    """`x`, whole on all ranks of the replica, for a block that is split among them: its gradient is summed over the replica."""
    return copy_to_replica(x, context.rank.replica)


def units_here(context: ModuleContext, whole: torch.Tensor, units: UnitRuns, block: int) -> torch.Tensor:
    """The units of a block that are here, of a tensor that has all of them."""
    return cut_units(whole, units, context.units[block]())


def leave(context: ModuleContext, partial: torch.Tensor) -> torch.Tensor:
    """The sum over the replica of what the units here give; summed where it lies."""
    return sum_over_replica(partial, context.rank.replica)


def add_bias(whole: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A bias, added once to the sum over the replica; under autocast their dtypes differ."""
    return whole + bias.to(whole.dtype)


def view(axes: tuple[int, ...], x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """As torch's; of a rank without units torch cannot tell what -1 stands for: for all of `axes` of `x`."""
    if not x.numel():
        sizes = [math.prod(x.shape[axis] for axis in axes) if size == -1 else size for size in sizes]
    return x.reshape(sizes)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As torch's; on a rank without heads torch leaves the mask out of the graph, and its kernels for CUDA fail.

    A mask may have a gradient (T5's position bias), and that is summed over the replica: all ranks must come to that sum.
    """
    if query.numel():
        result = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    else:
        result = query @ key.transpose(-2, -1) @ value
    mask: torch.Tensor | None = args[0] if args else kwargs.get("attn_mask")
    if not result.numel() and mask is not None and mask.requires_grad:
        result = result + 0 * mask.sum()
    return result


def on_channels(context: ModuleContext, operation: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """A convolution or a pooling of (samples, channels, ...), where a rank may have no channel.

    torch refuses that, or returns another shape; so a channel of zeros takes part, and is left away from the result.
    """
    del context
    weight = args[0] if args and isinstance(args[0], torch.Tensor) else None
    transposed = "transpose" in str(operation)
    groups = args[5] if len(args) > 5 else 1
    channels = x.shape[1] if weight is None else weight.shape[1] * groups if transposed else weight.shape[0]
    if channels and x.shape[1]:
        return operation(x, *args)
    if not x.shape[1]:
        x = torch.cat((x, x.new_zeros(x.shape[0], 1, *x.shape[2:])), 1)
    if weight is None:
        return operation(x, *args)[:, :0]
    sizes = (x.shape[1], max(channels, 1)) if transposed else (max(channels, 1), x.shape[1])
    zeros = weight.new_zeros(*sizes, *weight.shape[2:])
    one_group = (1, *args[6:]) if len(args) > 5 else ()
    result = operation(x, zeros, None, *args[2:5], *one_group)[:, :channels]
    for own in args[:2]:  # so that the weight and the bias of no channel have gradients, of no element
        result = result if own is None else result + 0 * own.sum()
    return result
