"""A global batch: tensors in tuples, lists and dicts, whose first axis is the samples; and the part of it that is a rank's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tatami.errors import InputError
from tatami.tiling import Span

_LEAVES = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch that have samples, in order.

    Raises:
        InputError: something in it is neither a tensor nor a plain value; names where.
    """
    if isinstance(batch, (tuple, list)) and all(isinstance(each, torch.Tensor) for each in batch):
        return [each for each in batch if each.dim()]  # as it mostly is, and every step asks
    return [each for each in _leaves(batch, "") if isinstance(each, torch.Tensor) and each.dim()]


def samples_of(batch: Any) -> int:
    """How many samples a batch has.

    Raises:
        InputError: as `tensors_of`; it has no tensor, or tensors of different lengths.
    """
    if isinstance(batch, list) and len(batch) > 1 and all(isinstance(each, tuple | list | Mapping) for each in batch):
        raise InputError(
            f"this batch is a list of {len(batch)} {type(batch[0]).__name__}s, which seem to be samples; a batch is tensors "
            "(samples, ...): torch.utils.data.default_collate makes one of such a list"
        )
    sizes = {tensor.shape[0] for tensor in tensors_of(batch)}
    if not sizes:
        raise InputError(f"a batch must have a tensor (samples, ...); this one is a {type(batch).__name__} without any")
    if len(sizes) != 1:
        raise InputError(f"the tensors of a batch must have the same number of samples, not {sorted(sizes)}")
    return sizes.pop()


def cut_batch(batch: Any, span: Span, *, samples: int) -> Any:
    """The samples `span` of a batch of `samples`: views of its tensors, in the same structure.

    Texts that lie in a list of one for each sample are cut as well. Plain values, and tensors without an axis, are of all
    samples.
    """
    if isinstance(batch, torch.Tensor):
        return batch[span.slice()] if batch.dim() else batch
    if type(batch) is tuple and all(isinstance(value, torch.Tensor) for value in batch):
        return tuple(value[span.slice()] if value.dim() else value for value in batch)  # as it mostly is
    if isinstance(batch, Mapping):
        return {key: cut_batch(value, span, samples=samples) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut_batch(value, span, samples=samples) for value in batch))
    if isinstance(batch, tuple | list):
        if len(batch) == samples and all(isinstance(item, str | bytes) for item in batch):
            return batch[span.slice()]
        return type(batch)([cut_batch(value, span, samples=samples) for value in batch])
    return batch


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`, in the same structure."""

    if isinstance(batch, tuple | list) and all(isinstance(each, torch.Tensor) and each.device == device for each in batch):
        return batch  # as it mostly is on the CPU, and every step asks

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # of a class that torch does not look into
            return {key: on_device(value, device) for key, value in leaf.items()}
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(move, batch)


def _leaves(batch: Any, path: str) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{path}[{index}]")
    elif isinstance(batch, _LEAVES):
        yield batch
    else:
        raise InputError(
            f"batch{path} is a {type(batch).__name__}, which cannot be cut into the samples of each rank. A batch is tensors, "
            "and tuples, lists and dicts of them; see torch.as_tensor"
        )
