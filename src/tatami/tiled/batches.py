"""Global batches, of which every rank fetches its own samples only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tatami.comm.agreement import debugging, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.datasets.samples import Data, Samples
from tatami.errors import InputError
from tatami.tiled.model import TiledModel
from tatami.tiled.same_batch import compare, numbers_of
from tatami.tiling import Span


class Batches:
    """A data set cut into global batches. Every rank must be given the same data.

    Args:
        data: see `Data`.
        batch_size: samples of a global batch; the last one of an epoch may be smaller.
        seed: of the shuffling; None keeps the order of the data.
    """

    def __init__(self, data: Data, *, batch_size: int, seed: int | None) -> None:
        check_data(data)
        self._tensors = cast("tuple[torch.Tensor, torch.Tensor]", data) if _is_tensors(data) else None
        self._data = data
        self.num_samples = len(self._tensors[0]) if self._tensors is not None else len(data)
        if self._tensors is not None and len(self._tensors[1]) != self.num_samples:
            raise InputError(f"{self.num_samples} inputs but {len(self._tensors[1])} targets; each input needs one")
        if self.num_samples == 0:
            raise InputError("the data set is empty")
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, not {batch_size}")
        self.batch_size = min(batch_size, self.num_samples)
        self._seed = seed

    def compare(self, comm: AbstractCommunicator) -> None:
        """Whether all ranks have the same data, cut alike: of tensors some numbers are looked at. Collective.

        Raises:
            InputError: they have not; names the ranks.
        """
        same_everywhere(comm, {"batch_size": self.batch_size, "seed": self._seed}, where="the batches of the Trainer")
        numbers = numbers_of(self.num_samples, self._tensors or (), whole=debugging())
        compare(numbers, comm, columns=(), everywhere=True, what="data")

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-self.num_samples // self.batch_size)

    def epoch(self, number: int, model: TiledModel) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """For each global batch: its number of samples, and the inputs and targets (samples_here, ...) of this rank.

        The tiling may change between two batches.
        """
        order = None
        if self._seed is not None:
            order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed((self._seed + number) % 2**64))
        for start in range(0, self.num_samples, self.batch_size):
            size = min(self.batch_size, self.num_samples - start)
            span = model.local_span(size)
            mine = Span(start + span.start, start + span.stop)
            x, y = self._fetch(mine, None if order is None else order[mine.slice()])
            yield size, x, y

    def _fetch(self, mine: Span, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self._tensors is not None:
            x, y = self._tensors
            return (x[mine.slice()], y[mine.slice()]) if order is None else (x[order], y[order])
        indices: Sequence[int] = range(mine.start, mine.stop) if order is None else order.tolist()
        samples = cast("Samples", self._data)
        if not indices:
            x, y = default_collate([samples[0]])
            return x[:0], y[:0]
        x, y = default_collate([samples[index] for index in indices])
        return x, y


def check_data(data: object) -> None:
    """
    Raises:
        InputError: neither two tensors nor a map-style data set.
    """
    if isinstance(data, DataLoader):
        raise InputError(
            "the Trainer cuts the batches itself, so that each rank reads its own part of them: give the data set "
            "(loader.dataset) and batch_size in the place of a DataLoader"
        )
    if isinstance(data, IterableDataset) or not isinstance(data, Samples):
        raise InputError(
            f"data must be a pair of tensors (inputs, targets), or a data set with len() and [index], not a "
            f"{type(data).__name__}: each rank reads its own samples of every batch"
        )
    if isinstance(data, tuple | list) and len(data) == 2 and not _is_tensors(data) and not isinstance(data[0], tuple | list):
        kinds = ", ".join(type(part).__name__ for part in data)
        raise InputError(f"data must be a pair of tensors (inputs, targets), not ({kinds}); see torch.as_tensor")


def _is_tensors(data: object) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data)
