"""Batches of data that can be indexed: every rank fetches its own samples only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from tatami.batch import cut_batch, on_device, samples_of, tensors_of
from tatami.comm.agreement import debugging, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.datasets.dataset import Samples
from tatami.errors import InputError
from tatami.inputs import check_at_least
from tatami.model.model import TiledModel
from tatami.runtime.phases import IterationPhase
from tatami.runtime.same_batch import numbers_of, refuse_other_batches
from tatami.tiling import Span
from tatami.train.batches import AbstractBatches, LocalBatch


class IndexedBatches(AbstractBatches):
    """Tensors, or a map-style data set, cut into global batches.

    Args:
        data: tensors (samples, ...) in any structure, or `Samples`.
        batch_size: samples of a global batch; the last one of an epoch may be smaller.
        seed: of the shuffling; None keeps the order of the data, and so does a batch of all samples.
    """

    def __init__(self, data: Any, *, batch_size: int, seed: int | None, name: str = "the data set") -> None:
        self._samples: Samples | None = None if is_tensors(data) else data
        self._data = data
        self.num_samples: int = _length(data) if self._samples is None else len(data)
        if self.num_samples == 0:
            raise InputError(f"{name} is empty")
        check_at_least(1, batch_size=batch_size)
        self.batch_size: int = min(batch_size, self.num_samples)
        self.num_batches: int = -(-self.num_samples // self.batch_size)
        self._shuffles = seed is not None
        self._seed = seed if self.num_batches > 1 else None

    def compare(self, comm: AbstractCommunicator) -> None:
        same_everywhere(comm, {"batch_size": self.batch_size, "seed": self._seed}, where="the batches of the Trainer")
        tensors = tensors_of(self._data) if self._samples is None else ()
        numbers = numbers_of(self.num_samples, tensors, whole=debugging())
        refuse_other_batches(comm.allgather_object(numbers), everywhere=True, what="data")

    def sample(self, most: int) -> tuple[Any, int]:
        return self._fetch(Span(0, min(most, self.batch_size)), None), self.batch_size

    def epoch(
        self, number: int, model: TiledModel, *, skip: int = 0, most: int | None = None, agree: bool = False
    ) -> Iterator[LocalBatch]:
        del most, agree  # a batch is not fetched before it is asked for, and all ranks know how many there are
        order = None
        if self._seed is not None:
            order = torch.randperm(
                self.num_samples,
                generator=torch.Generator().manual_seed((self._seed + number) % 2**64),
                dtype=torch.int64,
                device="cpu",
            )
        for start in range(skip * self.batch_size, self.num_samples, self.batch_size):
            size = min(self.batch_size, self.num_samples - start)
            with model.phases.during(IterationPhase.OUTSIDE):
                span = model.local_span(size)
                mine = Span(start + span.start, start + span.stop)
                here = on_device(self._fetch(mine, None if order is None else order[mine.slice()]), model.device)
                if self._samples is not None:  # which may draw, as augmentations do
                    model.announce_share(size, here)
            yield LocalBatch(size=size, here=here, is_last=start + size == self.num_samples)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "shuffle": self._shuffles, "seed": self._seed}

    def _fetch(self, mine: Span, order: torch.Tensor | None) -> Any:
        if self._samples is None:
            if order is None:
                return cut_batch(self._data, mine, samples=self.num_samples)
            return _picked(self._data, order)
        indices = range(mine.start, mine.stop) if order is None else order.tolist()
        if not len(indices):
            return cut_batch(default_collate([self._samples[0]]), Span(0, 0), samples=1)
        return default_collate([self._samples[index] for index in indices])


def is_tensors(data: Any) -> bool:
    """Whether data are tensors, and tuples and dicts of them."""
    if isinstance(data, dict | tuple):
        values = data.values() if isinstance(data, dict) else data
        return len(values) > 0 and all(is_tensors(value) for value in values)
    return isinstance(data, torch.Tensor)


def _length(data: Any) -> int:
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
        inputs, targets = len(data[0]), len(data[1])
        if inputs != targets:
            raise InputError(f"{inputs} inputs but {targets} targets; each input needs one")
    return samples_of(data)


def _picked(data: Any, order: torch.Tensor) -> Any:
    if isinstance(data, dict):
        return {key: _picked(value, order) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(_picked(value, order) for value in data)
    return data[order] if data.dim() else data
