"""Batch normalization over each replica's own samples, as DDP has it: `tatami.tile(..., batch_norm="local")`.

Running statistics are averaged over the replicas after every forward pass in training, each with the weight of its samples, by
one sum for all layers. So every rank holds the same ones at all times, and whatever reads them (evaluation, checkpoints,
re-tilings, ranks without samples) need not ask others. DDP keeps those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tatami.runtime.context import RankContext
from tatami.runtime.rows import UnitRuns
from tatami.tiling import Span

_KEPT = ("running_mean", "running_var")


@dataclass(frozen=True, kw_only=True)
class SplitStatistics:
    """Where on a running statistic the units of a block lie.

    Attributes:
        runs: of its one axis.
        units: the units here, and how many there are.
    """

    runs: UnitRuns
    units: Callable[[], tuple[Span, int]]

    def here(self) -> tuple[torch.Tensor, int]:
        """The places of the channels here, and how many channels there are."""
        span, total = self.units()
        ranges = [
            torch.arange(start + span.start * inner, start + span.stop * inner, dtype=torch.int64, device="cpu")
            for start, inner in self.runs.runs
        ]
        return torch.cat(ranges), total * self.runs.per_unit


class LocalStatistics:
    """Averages the running statistics of the replicas.

    Args:
        module: the network.
        rank: whose samples these are.
        split: of tensors that hold some units, by name.
    """

    def __init__(self, module: nn.Module, *, rank: RankContext, split: Mapping[str, SplitStatistics]) -> None:
        self._rank = rank
        self._layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
        self._split = split

    @torch.no_grad()
    def average(self) -> None:
        """After a forward pass in training. Collective."""
        rank, found = self._rank, list(self._found())
        if not found or rank.sums is None or not rank.sums_statistics:
            return
        size = 1 + sum(channels for _, _, channels in found)
        weight = float(rank.mine.size if rank.samples else rank.index is not None)
        room = rank.sums.room(size)
        room.zero_()
        room[0] = weight if rank.speaks else 0.0
        start = 1
        for tensor, positions, channels in found:
            part = room[start : start + channels]
            if positions is not None:
                part[positions] = tensor.double().cpu() * weight
            elif rank.speaks:
                part.copy_(tensor).mul_(weight)
            start += channels
        rank.waits(True)
        total = rank.sums.run("the running statistics of all batch normalizations")
        rank.waits(False)
        start = 1
        for tensor, positions, channels in found:
            mean = total[start : start + channels] / total[0]
            tensor.copy_(mean if positions is None else mean[positions])
            start += channels

    def _found(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, int]]:
        """The running statistics that a pass updates, where the channels here lie on them, and how many there are in all."""
        for name, layer in self._layers:
            for kept in _KEPT if layer.training else ():
                tensor = layer._buffers.get(kept)
                if tensor is not None:
                    split = self._split.get(f"{name}.{kept}" if name else kept)
                    positions, channels = (None, tensor.numel()) if split is None else split.here()
                    yield tensor, positions, channels
