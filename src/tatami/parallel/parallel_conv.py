"""A convolution whose output channels are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from tatami import functions
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError
from tatami.parallel.spanning import AbstractSpanning

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ParallelConv(AbstractSpanning):
    """Each rank computes some output channels, and gets those of the others. Input and output are whole, the same on all ranks.

    It has two forms:

    * Dense, the default: exactly `conv`, on any number of ranks. Each output channel sees the inputs that it sees in `conv`.
    * `grouped`, ChainerMN's ParallelConvolution2D: another network than `conv`, and another one for each number of ranks. The
      output channels of rank r see only the input channels r, r + size, r + 2 size ...: it is `conv` with all other weights
      zero, and takes `1 / size` of its weights and of its work.

    Gradients are those of the sum of the losses of all ranks. Ranks that go on alike from the same output have the same loss:
    they call `tatami.functions.share(loss, comm).backward()`. The weights here then have their whole gradient. What all ranks
    hold alike, the input and the parameters of other layers, has this rank's share of it: sum it over the ranks.

    Attributes:
        comm: the ranks.
        conv: the output channels of this rank; None where it has none.
        channels: how many output channels each rank has.
        grouped: which form.
    """

    def __init__(
        self, conv: Conv, comm: AbstractCommunicator, *, grouped: bool = False, channels: Sequence[int] | None = None
    ) -> None:
        """Nothing moves: each rank gives a `conv` and keeps its part of it.

        Args:
            conv: of the whole shape; ranks may have different values.
            comm: the ranks.
            grouped: ChainerMN's form.
            channels: how many output channels each rank is to have, in the dense form; None for equal numbers, as far as that
                goes.

        Raises:
            ModelError: another module, or one that does not know its channels yet; in the grouped form, one that has groups
                already, or fewer input channels than there are ranks.
            InputError: `channels` that are too few, too many negative, or that cut a group of `conv`.
        """
        super().__init__()
        _check(conv, comm, grouped=grouped)
        if grouped and channels is not None:
            raise InputError("grouped=True divides the channels as ChainerMN does; leave channels out")
        per_group = conv.out_channels // conv.groups
        self.comm = comm
        self.grouped = grouped
        self.channels = _even(conv, comm) if channels is None else _given(conv, comm, channels)
        start = sum(self.channels[: comm.rank])
        rows = slice(start, start + self.channels[comm.rank])
        if grouped:
            inputs = slice(comm.rank, conv.in_channels, comm.size)
        else:
            in_group = conv.in_channels // conv.groups
            inputs = slice(rows.start // per_group * in_group, -(-rows.stop // per_group) * in_group)
        self._num_inputs = conv.in_channels
        self.conv = _part(conv, rows, inputs, grouped=grouped) if self.channels[comm.rank] else None
        self._channel_dim = -1 - len(conv.kernel_size)
        self._seen: tuple[Any, ...] = (..., inputs, *(slice(None) for _ in conv.kernel_size))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve.

        Args:
            input: `(samples, channels, ...)` or `(channels, ...)`, the same on all ranks.

        Returns:
            `(samples, output channels, ...)` or `(output channels, ...)`, the same on all ranks.

        Raises:
            InputError: another number of channels.
            CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
        """
        dim = self._channel_dim
        if input.dim() < -dim or input.shape[dim] != self._num_inputs:
            raise InputError(
                f"ParallelConv on rank {self.comm.rank}: input has the shape {tuple(input.shape)}; dimension {dim} must be the "
                f"{self._num_inputs} channels"
            )
        # A rank without channels gives nothing of the input, and not nothing at all: what comes before has a gradient of zeros
        # then, where others have a share. torch.cat takes such parts, and so the loss of the only rank with channels knows of
        # this exchange, too.
        mine = input.reshape(-1)[:0] if self.conv is None else self.conv(input[self._seen])
        parts = functions.allgather(mine, self.comm)
        dtype = next(part.dtype for part, number in zip(parts, self.channels, strict=True) if number)
        return torch.cat([part.to(dtype) for part in parts], dim=dim)

    def extra_repr(self) -> str:
        form = "grouped" if self.grouped else "dense"
        return f"{form}, {sum(self.channels)} channels as {self.channels} on ranks, this is rank {self.comm.rank}"


def _check(conv: Conv, comm: AbstractCommunicator, *, grouped: bool) -> None:
    if not isinstance(conv, Conv) or isinstance(conv, nn.modules.lazy.LazyModuleMixin):
        raise ModelError(f"conv is a {type(conv).__name__}; give an nn.Conv1d, nn.Conv2d or nn.Conv3d of known channels")
    if grouped and conv.groups != 1:
        raise ModelError(f"conv has {conv.groups} groups, and grouped=True makes groups of its own; give one with groups=1")
    if grouped and conv.in_channels < comm.size:
        raise ModelError(
            f"{conv.in_channels} input channels are too few for a grouped convolution on {comm.size} ranks; give one for each "
            "at least, or take the dense form"
        )


def _even(conv: Conv, comm: AbstractCommunicator) -> tuple[int, ...]:
    """Whole groups for each rank, one more for the first ones."""
    units = conv.groups if conv.groups > 1 else conv.out_channels
    size = conv.out_channels // units
    return tuple((units // comm.size + (rank < units % comm.size)) * size for rank in range(comm.size))


def _given(conv: Conv, comm: AbstractCommunicator, channels: Sequence[int]) -> tuple[int, ...]:
    if len(channels) != comm.size:
        raise InputError(f"channels={list(channels)} has {len(channels)} entries for {comm.size} ranks; give one for each")
    if min(channels) < 0 or sum(channels) != conv.out_channels:
        raise InputError(f"channels={list(channels)} must be at least 0 and add up to the {conv.out_channels} output channels")
    per_group = conv.out_channels // conv.groups
    if conv.groups > 1 and any(number % per_group for number in channels):
        raise InputError(f"channels={list(channels)} cuts a group of {per_group} output channels; give multiples of it")
    return tuple(channels)


def _part(conv: Conv, rows: slice, inputs: slice, *, grouped: bool) -> Conv:
    """`conv` with these output channels, and the input channels that they see."""
    part = deepcopy(conv)
    columns = inputs if grouped else slice(None)
    part.weight = nn.Parameter(conv.weight.detach()[rows, columns].clone(), requires_grad=conv.weight.requires_grad)
    if conv.bias is not None:
        part.bias = nn.Parameter(conv.bias.detach()[rows].clone(), requires_grad=conv.bias.requires_grad)
    part.out_channels = rows.stop - rows.start
    part.in_channels = len(range(conv.in_channels)[inputs])
    part.groups = part.in_channels // part.weight.shape[1]
    return part
