"""From data of any kind to global batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from tatami.datasets.dataset import Samples
from tatami.errors import InputError
from tatami.train.batches import AbstractBatches
from tatami.train.indexed_batches import IndexedBatches, is_tensors
from tatami.train.loaded_batches import LoadedBatches

TrainingData = torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Samples | Iterable[Any]
"""One of

- tensors (samples, ...): a pair (inputs, targets), any other tuple, or a dict;
- a map-style data set, of which each rank fetches its own samples;
- a `DataLoader`, or any iterable of global batches, with or without a length, which every rank goes through; a list is one
  where there is no batch size.
"""


def batches_of(
    data: TrainingData, *, batch_size: int | None, seed: int | None = None, name: str = "the data set"
) -> AbstractBatches:
    """The global batches of `data`.

    Args:
        batch_size: of the global batch; not for what comes in batches already.
        seed: of the shuffling of data that can be indexed; None keeps their order.

    Raises:
        InputError: no data; a batch size where there is one already, or none where there must be one.
    """
    nested = (tuple, list, Mapping)
    if isinstance(data, tuple | list) and len(data) == 2 and not is_tensors(data) and not isinstance(data[0], nested):
        kinds = ", ".join(type(part).__name__ for part in data)
        raise InputError(f"data must be a pair of tensors (inputs, targets), not ({kinds}); see torch.as_tensor")
    if isinstance(data, IterableDataset):
        if batch_size is None:
            raise InputError("an IterableDataset gives single samples: say batch_size, or give a DataLoader of it")
        return LoadedBatches(DataLoader(data, batch_size=batch_size))
    if batch_size is None and isinstance(data, list) and data and _may_be_batch(data[0]):
        return LoadedBatches(data)
    if not comes_in_batches(data):
        if batch_size is None:
            raise InputError("say batch_size: how many samples the global batches have that these data are cut into")
        return IndexedBatches(data, batch_size=batch_size, seed=seed, name=name)
    if not isinstance(data, Iterable) or isinstance(data, dict | str | bytes):
        raise InputError(
            "data must be tensors (a pair of inputs and targets, a tuple or a dict), a data set with len() and [index], or an "
            f"iterable of batches such as a DataLoader, not a {type(data).__name__}"
        )
    if batch_size is not None:
        raise InputError(
            f"a {type(data).__name__} gives whole batches, and each is a global batch: leave batch_size out, or give the data "
            "set itself (loader.dataset), of which each rank then reads its own samples only"
        )
    return LoadedBatches(data)


def _may_be_batch(item: Any) -> bool:
    """Whether an item of a list is not a single sample for certain, as one with a number in place of targets is."""
    leaves = pytree.tree_leaves(item)
    return all(isinstance(leaf, str) or (isinstance(leaf, torch.Tensor) and leaf.dim() > 0) for leaf in leaves)


def comes_in_batches(data: Any) -> bool:
    """Whether it cannot be indexed, and so is taken for an iterable of batches."""
    return not is_tensors(data) and (isinstance(data, dict | str | bytes | IterableDataset) or not isinstance(data, Samples))
