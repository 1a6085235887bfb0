"""Batch normalization over each replica's own samples, as DDP has it: `tatami.tile(..., batch_norm="local")`.

Running statistics are averaged over the replicas after every forward pass in training, each with the weight of its samples, by
one sum for all layers. So every rank holds the same ones at all times, and whatever reads them (evaluation, checkpoints,
re-tilings, ranks without samples) need not ask others. DDP keeps those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tatami.batch_statistics import uncounted
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

    def here(self) -> tuple[torch.Tensor | None, int]:
        """The places of the channels here, None where all are, and how many channels there are."""
        span, total = self.units()
        if span.size == total and len(self.runs.runs) == 1:
            return None, total * self.runs.per_unit
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
        tensors, positions, channels = zip(*found, strict=True)
        starts = [*accumulate(channels, initial=1)]
        place: slice | torch.Tensor = slice(1, starts[-1])
        if any(each is not None for each in positions):
            ranges = zip(starts, positions, channels, strict=False)
            everywhere = torch.arange(max(channels), device="cpu")
            place = torch.cat([start + (everywhere[:length] if own is None else own) for start, own, length in ranges])
        weight = float(rank.mine.size if rank.samples else rank.index is not None)
        sizes = [each.numel() for each in tensors]
        weights = [weight if own is not None or rank.speaks else 0.0 for own in positions]
        factors = torch.tensor(weights, dtype=torch.float64, device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))
        room = torch.from_numpy(rank.sums.room(starts[-1])).zero_()
        room[0] = weight if rank.speaks else 0.0
        room[place] = torch.cat(tensors).double().cpu() * factors
        rank.waits(True)
        total = torch.from_numpy(rank.sums.run("the running statistics of all batch normalizations"))
        rank.waits(False)
        torch._foreach_copy_([uncounted(each) for each in tensors], torch.split(total[place] / total[0], sizes))

    def _found(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, int]]:
        """The running statistics that a pass updates, where the channels here lie on them, and how many there are in all."""
        for name, layer in self._layers:
            for kept in _KEPT if layer.training else ():
                tensor = layer._buffers.get(kept)
                if tensor is not None:
                    split = self._split.get(f"{name}.{kept}" if name else kept)
                    positions, channels = (None, tensor.numel()) if split is None else split.here()
                    yield tensor, positions, channels
