"""Windows of MPI: `Win.Allocate`, `Win.Create` over memory there is already, and `Win.Allocate_shared`.

A notice of Tatami's own says that a rank has posted: it is waited for politely and with a timeout. So MPICH's post and start
are made with MODE_NOCHECK: its 5.0 never returns from start when a rank that is not among the targets has posted already. Open
MPI's are not: its 5.0 then never tells the target that the epoch is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from tatami.clock import Clock, SystemClock
from tatami.collective import Sync
from tatami.comm.base import AbstractCommunicator
from tatami.comm.memory_barrier import CounterBarrier, meet, notices, polls_before_yield
from tatami.comm.reduction import Op
from tatami.comm.session import WATCHDOG
from tatami.comm.wait import Waiting, wait_for, wait_policy
from tatami.comm.window import AbstractSharedWindow, AbstractWindow, check_access, check_window_open
from tatami.errors import CommTimeoutError, InputError

PAGE = 4096
_POSTED, _DONE, _MET = 0, 1, 2
"""Tags, on a communicator of the window's own."""


class AbstractMpiCommunicator(AbstractCommunicator):
    """What messages and windows of an MPI communicator have in common: its handle, its waits, and tensors as MPI sees them."""

    def __init__(self, comm: Any, *, mpi: ModuleType, hosts: tuple[str, ...], timeout_s: float, clock: Clock | None) -> None:
        """`comm` is an mpi4py communicator, `mpi` is `mpi4py.MPI`."""
        super().__init__(rank=comm.Get_rank(), hosts=hosts, timeout_s=timeout_s)
        self.mpi = mpi
        self.clock = clock or SystemClock()
        self.handle = comm
        self._gave_up = False
        self._types = {
            torch.float64: mpi.DOUBLE,
            torch.float32: mpi.FLOAT,
            torch.int64: mpi.INT64_T,
            torch.int32: mpi.INT32_T,
            torch.uint8: mpi.UINT8_T,
        }
        self.ops = {Op.SUM: mpi.SUM, Op.MAX: mpi.MAX, Op.MIN: mpi.MIN}
        self.policy = wait_policy(ranks_on_host=self.local_size, cores=len(os.sched_getaffinity(0)))

    def gave_up(self) -> None:
        """Transfers on this communicator will not come to their end."""
        self._gave_up = True

    def wait_for(self, done: Callable[[], bool], waiting: Callable[[], Waiting]) -> None:
        """Wait politely, for what `waiting` describes.

        Raises:
            CommTimeoutError: names who did not come.
        """
        wait_for(done, waiting, policy=self.policy, timeout_s=self.timeout_s, clock=self.clock)

    def memory_of(self, tensor: torch.Tensor) -> Any:
        """The memory of a contiguous tensor."""
        return self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def as_buffer(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor as MPI takes it: memory, bytes, MPI's type of a byte."""
        return [self.memory_of(tensor), tensor.nbytes, self.mpi.BYTE]

    def as_typed(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor as MPI computes with it: memory, elements, MPI's type of an element.

        Raises:
            InputError: MPI has no such type to compute with.
        """
        if tensor.dtype not in self._types:
            raise InputError(f"MPI does not add up {tensor.dtype}; accumulate float32 instead")
        return [self.memory_of(tensor), tensor.numel(), self._types[tensor.dtype]]


class MpiWindow(AbstractWindow):
    """Remote memory access among all ranks of `comm`, which the window takes over and closes."""

    def __init__(
        self, comm: AbstractMpiCommunicator, *, size: int, dtype: torch.dtype, sync: Sync, memory: torch.Tensor | None
    ) -> None:
        """`memory` (size,) is exposed where it lies; None: MPI allocates, which lets ranks of one host reach it directly."""
        self._comm = comm
        self._mpi = comm.mpi
        self.sync = sync
        self._closed = False
        self._group = comm.handle.Get_group()
        self._assertion = 0 if "Open MPI" in comm.library else comm.mpi.MODE_NOCHECK
        nbytes = size * dtype.itemsize
        comm.barrier()
        with WATCHDOG.watch(f"making a window on rank {comm.rank} of {comm.size}", timeout_s=comm.timeout_s):
            if memory is None:
                self._win = self._mpi.Win.Allocate(nbytes, 1, comm=comm.handle)
                self.tensor = _tensor(self._win.tomemory(), size, dtype)
            else:
                self._win = self._mpi.Win.Create(comm.memory_of(memory), 1, comm=comm.handle)
                self.tensor = memory
        if memory is None:
            self.tensor.zero_()
        if sync is Sync.LOCK:
            self._win.Lock_all(self._mpi.MODE_NOCHECK)
        comm.barrier()

    def put(self, tensor: torch.Tensor, target: int, *, start: int) -> None:
        self._check("put", tensor, target, start)
        self._win.Put(self._comm.as_buffer(tensor), target, (start * tensor.itemsize, tensor.nbytes, self._mpi.BYTE))

    def get(self, out: torch.Tensor, source: int, *, start: int) -> None:
        self._check("get", out, source, start)
        self._win.Get(self._comm.as_buffer(out), source, (start * out.itemsize, out.nbytes, self._mpi.BYTE))

    def accumulate(self, tensor: torch.Tensor, target: int, *, start: int, op: Op) -> None:
        self._check("accumulate", tensor, target, start)
        if tensor.dtype == torch.bool:  # a sum of truths is `or`
            tensor, op = tensor.view(torch.uint8), Op.MAX if op is Op.SUM else op
        mine = self._comm.as_typed(tensor)
        self._win.Accumulate(mine, target, (start * tensor.itemsize, *mine[1:]), self._comm.ops[op])

    def enter(self, ranks: Sequence[int]) -> None:
        if self.sync is Sync.FENCE:
            self._fence()
        elif self.sync is Sync.LOCK:  # a lock is held for as long as the window lives
            meet(self._comm, ranks, tag=_MET)

    def open(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self.sync is not Sync.PSCW:
            return
        if sources:
            group = self._group.Incl(list(sources))
            self._win.Post(group, self._assertion)
            group.Free()
        notices(self._comm, to=sources, by=targets, tag=_POSTED)
        if targets:
            group = self._group.Incl(list(targets))
            with self._watch("start"):
                self._win.Start(group, self._assertion)
            group.Free()

    def end(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self.sync is Sync.FENCE:
            self._fence()
        elif self.sync is Sync.LOCK:
            for target in targets:
                with self._watch("flush", peer=target):
                    self._win.Flush(target)
            notices(self._comm, to=targets, by=sources, tag=_DONE)
        else:
            if targets:
                with self._watch("complete"):
                    self._win.Complete()
            if sources:
                comm, missing = self._comm, tuple(sources)
                waiting = Waiting(operation="wait of a window", rank=comm.rank, size=comm.size, missing=missing)
                try:
                    comm.wait_for(self._win.Test, lambda: waiting)
                except CommTimeoutError:
                    comm.gave_up()
                    raise

    def _fence(self) -> None:
        self._comm.barrier()
        with self._watch("fence"):
            self._win.Fence()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._comm.barrier()
            if self.sync is Sync.LOCK:
                self._win.Unlock_all()
            with self._watch("closing"):
                self._win.Free()
            self._comm.close()

    def _check(self, what: str, tensor: torch.Tensor, peer: int, start: int) -> None:
        check_window_open(self._closed)
        check_access(tensor, self.tensor, peer=peer, ranks=self._comm.size, start=start, what=what)

    def _watch(self, call: str, *, peer: int | None = None) -> Any:
        towards = "" if peer is None else f" towards rank {peer}"
        comm = self._comm
        text = f"{call} of a window on rank {comm.rank} of {comm.size}{towards}"
        return WATCHDOG.watch(text, timeout_s=comm.timeout_s, findings=lambda: _findings(comm, text))


def _findings(comm: AbstractMpiCommunicator, text: str) -> str:
    return "" if comm.roll_call is None else f"({comm.roll_call.findings(text, size=comm.size, waited_s=comm.timeout_s)})"


class MpiSharedWindow(AbstractSharedWindow):
    """Memory shared by all ranks of `comm`, which must be on one host; the window takes `comm` over and closes it."""

    def __init__(self, comm: AbstractMpiCommunicator, *, size: int, dtype: torch.dtype) -> None:
        if len(set(comm.hosts)) > 1:
            hosts = ", ".join(sorted(set(comm.hosts))[:4])
            raise InputError(f"a shared window needs ranks of one host, and these are on {hosts}; split by host first")
        self._comm = comm
        self._closed = False
        mpi = comm.mpi
        # Every rank's part ends on a page of its own for its counter, so that vectors begin on pages too.
        vector_bytes = -(-size * dtype.itemsize // PAGE) * PAGE
        comm.barrier()
        with WATCHDOG.watch(f"making a shared window on rank {comm.rank} of {comm.size}", timeout_s=comm.timeout_s):
            self._win = mpi.Win.Allocate_shared(vector_bytes + PAGE, 1, comm=comm.handle)
        # Win.Sync, the memory fence, is allowed inside of an access epoch only.
        self._win.Lock_all(mpi.MODE_NOCHECK)
        memories = [self._win.Shared_query(rank)[0] for rank in range(comm.size)]
        self._tensors = [_tensor(memory, size, dtype) for memory in memories]
        self.tensor = self._tensors[comm.rank]
        self.tensor.zero_()
        counters = [memoryview(memory)[vector_bytes : vector_bytes + 8].cast("q") for memory in memories]
        counters[comm.rank][0] = 0
        self._barrier = CounterBarrier(
            counters,
            rank=comm.rank,
            policy=comm.policy,
            timeout_s=lambda: comm.timeout_s,
            clock=comm.clock,
            visible=self._win.Sync,
            polls=polls_before_yield(ranks_on_host=comm.size),
        )
        comm.barrier()

    def of(self, rank: int) -> torch.Tensor:
        check_window_open(self._closed)
        return self._tensors[rank]

    def barrier(self) -> None:
        self._barrier.wait()

    def make_visible(self) -> None:
        self._win.Sync()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._comm.barrier()
            self._win.Unlock_all()
            with WATCHDOG.watch("closing a shared window", timeout_s=self._comm.timeout_s):
                self._win.Free()
            self._comm.close()


def _tensor(memory: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The beginning of MPI's memory as a tensor (size,)."""
    if size == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=size)
