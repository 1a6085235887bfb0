"""The sum over a column whose ranks are on several hosts: straight from everyone to everyone, in one or two phases.

Each rank completes its part of the vector and gives it back, which carries 2 (k - 1) / k of it, as little as any all-reduce. A
library's nonblocking all-reduce takes some 2 log k steps for the same, each of which waits for a rank to look after it; on a
host that has a tenth of a core, a step is milliseconds.
"""

from __future__ import annotations

import torch

from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.tiling import largest_remainder, spans

_WHOLE_BYTES = 16 * 1024
"""Up to so much to send, everyone sends the whole to everyone, in one phase: a message costs more than its bytes."""
_TAG = 9


class ColumnSum:
    """Sums vectors over all ranks of one communicator; the same bits on every rank, and in every run.

    Args:
        comm: the ranks of the column.
    """

    def __init__(self, comm: AbstractCommunicator) -> None:
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._rooms: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def sum_(self, vector: torch.Tensor) -> None:
        """Sum the contiguous `vector` (size,) over the ranks, in place. Collective.

        Raises:
            CommTimeoutError, RankDiedError: a rank did not come.
        """
        size = self._comm.size
        if size == 2 or vector.numel() < size or vector.nbytes * (size - 1) <= _WHOLE_BYTES:
            self._add(vector, [vector] * len(self._others), tag=_TAG)
            return
        parts = [vector[span.slice()] for span in spans(largest_remainder([1 / size] * size, total=vector.numel()))]
        own = parts[self._comm.rank]
        self._add(own, [parts[rank] for rank in self._others], tag=_TAG)
        requests = [self._comm.irecv(parts[rank], rank, tag=_TAG + 1) for rank in self._others]
        requests += [self._comm.isend(own, rank, tag=_TAG + 1) for rank in self._others]
        _wait(requests)

    def _add(self, own: torch.Tensor, given: list[torch.Tensor], *, tag: int) -> None:
        """Give `given[i]` to the i-th other rank, and add what comes from all of them to `own`, in the order of the ranks."""
        rooms = self._room(own)
        requests = [self._comm.irecv(room, rank, tag=tag) for room, rank in zip(rooms, self._others, strict=True)]
        requests += [self._comm.isend(part, rank, tag=tag) for part, rank in zip(given, self._others, strict=True)]
        _wait(requests)
        # In the order of the ranks everywhere: those who complete the same elements get the same bits.
        contributions = [*rooms[: self._comm.rank], own, *rooms[self._comm.rank :]]
        total, last = contributions[0], contributions[-1]
        for contribution in contributions[1:-1]:
            total.add_(contribution)
        torch.add(total, last, out=own)

    def _room(self, own: torch.Tensor) -> list[torch.Tensor]:
        key = own.numel(), own.dtype
        if key not in self._rooms:
            self._rooms = {key: [torch.empty_like(own) for _ in self._others]}
        return self._rooms[key]


def _wait(requests: list[AbstractRequest]) -> None:
    for request in requests:
        request.wait()
