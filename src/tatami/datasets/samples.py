"""What can be trained on: two tensors, or any map-style data set."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Samples(Protocol):
    """A map-style data set: `len(data)` samples, each `data[i] == (x, y)`.

    Every `torch.utils.data.Dataset` with a length is of this kind.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]: ...


Data = tuple[torch.Tensor, torch.Tensor] | Samples
"""All inputs (samples, ...) and all targets (samples, ...) as tensors, or a map-style data set."""
