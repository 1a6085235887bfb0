"""Windows among threads: every thread sees all tensors anyway, so a put is a copy; epochs are empty messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tatami.collective import Sync
from tatami.comm.base import AbstractCommunicator
from tatami.comm.memory_barrier import meet, notices
from tatami.comm.reduction import Op, combine
from tatami.comm.window import AbstractSharedWindow, AbstractWindow, check_access, check_window_open

_POSTED, _DONE, _MET = 0, 1, 2
"""Tags, on a communicator of the window's own."""


class ThreadWindow(AbstractWindow):
    """The tensors of all threads, by rank; takes `comm` over and closes it. `lock` is held while a tensor is added to."""

    def __init__(
        self, comm: AbstractCommunicator, tensors: Sequence[torch.Tensor], *, sync: Sync, lock: AbstractContextManager[object]
    ) -> None:
        self._comm = comm
        self.sync = sync
        self.tensor = tensors[comm.rank]
        self._tensors = tensors
        self._lock = lock
        self._closed = False

    def put(self, tensor: torch.Tensor, target: int, *, start: int) -> None:
        self._room("put", tensor, target, start).copy_(tensor)

    def get(self, out: torch.Tensor, source: int, *, start: int) -> None:
        out.copy_(self._room("get", out, source, start))

    def accumulate(self, tensor: torch.Tensor, target: int, *, start: int, op: Op) -> None:
        room = self._room("accumulate", tensor, target, start)
        with self._lock:
            combine(room, tensor, op)

    def enter(self, ranks: Sequence[int]) -> None:
        if self.sync is not Sync.PSCW:
            meet(self._comm, ranks if self.sync is Sync.LOCK else range(self._comm.size), tag=_MET)

    def open(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self.sync is Sync.PSCW:
            notices(self._comm, to=sources, by=targets, tag=_POSTED)

    def end(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self.sync is Sync.FENCE:
            meet(self._comm, range(self._comm.size), tag=_MET)
        else:
            notices(self._comm, to=targets, by=sources, tag=_DONE)

    def close(self) -> None:
        self._closed = True
        self._comm.close()

    def _room(self, what: str, tensor: torch.Tensor, peer: int, start: int) -> torch.Tensor:
        check_window_open(self._closed)
        check_access(tensor, self.tensor, peer=peer, ranks=self._comm.size, start=start, what=what)
        return self._tensors[peer][start : start + tensor.numel()]


class ThreadSharedWindow(AbstractSharedWindow):
    """The tensors of all threads, by rank; takes `comm` over and closes it."""

    def __init__(self, comm: AbstractCommunicator, tensors: Sequence[torch.Tensor]) -> None:
        self._comm = comm
        self.tensor = tensors[comm.rank]
        self._tensors = tensors
        self._closed = False

    def of(self, rank: int) -> torch.Tensor:
        check_window_open(self._closed)
        return self._tensors[rank]

    def barrier(self) -> None:
        self._comm.barrier()

    def make_visible(self) -> None:
        """The interpreter's lock has done it."""

    def close(self) -> None:
        self._closed = True
        self._comm.close()
