"""Windows among threads: every thread sees all tensors anyway, so a put is a copy; epochs are empty messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tatami.collective import Sync
from tatami.comm.base import AbstractCommunicator
from tatami.comm.memory_barrier import meet, notices
from tatami.comm.reduction import Op, combine
from tatami.comm.window import AbstractSharedWindow, AbstractWindow, check_access, check_epoch_call, check_window_open

_POSTED, _COMPLETED, _MET = 0, 1, 2
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
        self._sources: tuple[int, ...] = ()
        self._targets: tuple[int, ...] = ()
        self._closed = False

    def put(self, tensor: torch.Tensor, target: int, *, start: int) -> None:
        self._room("put", tensor, target, start).copy_(tensor)

    def get(self, out: torch.Tensor, source: int, *, start: int) -> None:
        out.copy_(self._room("get", out, source, start))

    def accumulate(self, tensor: torch.Tensor, target: int, *, start: int, op: Op) -> None:
        room = self._room("accumulate", tensor, target, start)
        with self._lock:
            combine(room, tensor, op)

    def fence(self) -> None:
        check_epoch_call("fence", self.sync)
        meet(self._comm, range(self._comm.size), tag=_MET)

    def post(self, sources: Sequence[int]) -> None:
        check_epoch_call("post", self.sync)
        self._sources = tuple(sources)
        for source in sources:
            self._comm.isend(torch.empty(0, dtype=torch.uint8, device="cpu"), source, tag=_POSTED)

    def start(self, targets: Sequence[int]) -> None:
        check_epoch_call("start", self.sync)
        self._targets = tuple(targets)
        notices(self._comm, by=targets, tag=_POSTED)

    def complete(self) -> None:
        check_epoch_call("complete", self.sync)
        for target in self._targets:
            self._comm.isend(torch.empty(0, dtype=torch.uint8, device="cpu"), target, tag=_COMPLETED)
        self._targets = ()

    def wait(self) -> None:
        check_epoch_call("wait", self.sync)
        notices(self._comm, by=self._sources, tag=_COMPLETED)
        self._sources = ()

    def flush(self, target: int) -> None:  # noqa: ARG002 - a copy is there at once
        check_epoch_call("flush", self.sync)

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
