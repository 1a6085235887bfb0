"""Memory for large tensors that come and go: lent, and lent again when the tensor is gone.

A megabyte that is fresh from the system costs more than moving a megabyte between two ranks: each of its pages is made when it
is first touched, and given back when the tensor is gone. A training loop receives tensors of the same sizes again and again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_LEAST_BYTES = 128 * 1024
"""Less is kept by the allocator of the process itself."""
_MOST_FREE_BYTES = 64 * 1024**2


class Memory:
    """Lends memory by tensors."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._free_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, size_bytes: int) -> torch.Tensor:
        """A contiguous tensor (*shape) on the CPU, of `size_bytes`, with anything in it.

        Its memory is lent again when the last tensor that lies in it is gone. It cannot be resized.
        """
        if size_bytes < _LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        free = self._free.get(size_bytes)
        if free:
            memory = free.pop()
            self._free_bytes -= size_bytes
        else:
            memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        # The tensor made from this array is the only one to keep it, for as long as its storage is used.
        lent = memory.numpy()
        weakref.finalize(lent, _give_back, weakref.ref(self), memory).atexit = False
        # Not a view of it: torch refuses to change views that a function of autograd returned in place.
        return torch.empty(0, dtype=dtype, device="cpu").set_(torch.from_numpy(lent).untyped_storage()).resize_(shape)

    def take_back(self, memory: torch.Tensor) -> None:
        """What lay in `memory` is gone."""
        size_bytes = memory.nbytes
        if self._free_bytes + size_bytes > _MOST_FREE_BYTES:
            # What has gathered is of sizes that were used once.
            self._free.clear()
            self._free_bytes = 0
        if size_bytes <= _MOST_FREE_BYTES:
            self._free.setdefault(size_bytes, []).append(memory)
            self._free_bytes += size_bytes


def _give_back(owner: weakref.ReferenceType[Memory], memory: torch.Tensor) -> None:
    found = owner()
    if found is not None:
        found.take_back(memory)
