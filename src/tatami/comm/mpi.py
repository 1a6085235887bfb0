"""Ranks as MPI processes, through mpi4py, on tensors where they lie.

Nothing here blocks inside MPI: every operation is started in its nonblocking form and waited for by `wait_until`, so that a
wait ends after its timeout and leaves the core to others meanwhile.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType
from typing import Any, Never

import torch

from tatami.clock import Clock
from tatami.collective import Sync
from tatami.comm.base import AbstractRequest
from tatami.comm.checked import MAX_TAG
from tatami.comm.mpi_window import AbstractMpiCommunicator, MpiSharedWindow, MpiWindow
from tatami.comm.ranks import DEFAULT_TIMEOUT_S
from tatami.comm.reduction import Op, combine
from tatami.comm.session import abandoned, hold, load_mpi, say_goodbye_with, stop_all_ranks, takes_cuda
from tatami.comm.stall_report import AbstractRollCall, MpiRollCall, ProcessPlace
from tatami.comm.transport import Transport
from tatami.comm.wait import Waiting
from tatami.comm.window import AbstractSharedWindow, AbstractWindow, check_window
from tatami.errors import CommError

_RARE_S = 0.5e-3
_OWN_TAG = MAX_TAG + 1
"""The tag of exchanges inside collectives."""
_PIECE_BYTES = 1 << 20
"""Longer messages travel in pieces. Of MPICH's over TCP, two of 2 MiB and more that cross each other between the same two ranks
wait for each other: 4 MiB each way over 250 Mbit/s take 272 ms, in pieces of 1 MiB 135 ms. Sums have such messages inside, half
as long as they are: one of 4 MiB of four ranks takes 385 ms, in two parts 211 ms."""


class MpiRequest(AbstractRequest):
    """MPI requests that are complete together, and what must be done then."""

    def __init__(
        self,
        communicator: MpiCommunicator,
        requests: list[Any],
        *,
        operation: str,
        keep: tuple[torch.Tensor | None, ...],
        peer: int | None = None,
        tag: int | None = None,
        rooms_bytes: Sequence[int] = (),
        then: Callable[[], object] | None = None,
    ) -> None:
        """`keep` are the tensors MPI works on; `rooms_bytes` are the sizes of what must come, where that is to be checked."""
        self._communicator = communicator
        self._requests = requests
        self._operation = operation
        self._keep = keep
        self._peer = peer
        self._tag = tag
        self._rooms_bytes = rooms_bytes
        self._status = communicator.mpi.Status() if rooms_bytes else None
        self._arrived = 0
        self._then = then
        self._complete = False
        self._given_up = False

    def __del__(self) -> None:
        # Dropped under way, as where an error ends the step that began it: MPI writes where the tensors are.
        if not self._complete and not self._given_up:
            hold(self._requests, self._keep)

    def test(self) -> bool:
        if self._complete:
            return True
        try:
            while self._arrived < len(self._requests) and self._requests[self._arrived].Test(self._status):
                self._arrived += 1
                self._check_size(self._arrived - 1)
        except self._communicator.mpi.Exception as error:
            self._arrived += 1
            self._complete = self._arrived == len(self._requests)
            self._communicator.gave_up()
            raise CommError(f"{self._waiting().describe()}: MPI says: {error.Get_error_string()}") from error
        if self._arrived == len(self._requests):
            self._complete = True
            if self._then is not None:
                self._then()
        return self._complete

    def wait(self) -> None:
        try:
            self._communicator.wait_for(self.test, self._waiting)
        except Exception:
            if not self._complete:
                self._give_up()
            raise

    def _check_size(self, index: int) -> None:
        if self._status is None:
            return
        came_bytes = self._status.Get_count(self._communicator.mpi.BYTE)
        if came_bytes != self._rooms_bytes[index]:
            number = len(self._requests)
            self._complete = number == 1
            piece = "" if self._complete else f" as piece {index + 1} of {number} of {sum(self._rooms_bytes)}"
            raise CommError(
                f"{self._waiting().describe()}: {came_bytes} bytes came where {self._rooms_bytes[index]} were expected{piece}; "
                "shapes and dtypes must agree on both sides"
            )

    def _give_up(self) -> None:
        """A receive can be taken back; anything else keeps its tensors alive for as long as MPI may touch them."""
        self._communicator.gave_up()
        self._given_up = True
        left = self._requests[self._arrived :]
        if self._operation == "recv":
            for request in left:
                request.Cancel()
            left = [request for request in left if not request.Test()]
        if left:
            abandoned.append((left, self._keep))

    def _waiting(self) -> Waiting:
        communicator = self._communicator
        return Waiting(
            operation=self._operation, rank=communicator.rank, size=communicator.size, peer=self._peer, tag=self._tag
        )


class MpiCommunicator(AbstractMpiCommunicator):
    """One rank of an MPI job, or of a part of it made by `split`."""

    def __init__(
        self, comm: Any, *, mpi: ModuleType, hosts: tuple[str, ...], timeout_s: float, clock: Clock | None = None
    ) -> None:
        """Takes over `comm`, an mpi4py communicator on which no other code sends; `hosts` are those of its ranks."""
        super().__init__(comm, mpi=mpi, hosts=hosts, timeout_s=timeout_s, clock=clock)
        self._parts: list[MpiCommunicator] = []
        self._num_splits = 0

    @classmethod
    def world(cls, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> MpiCommunicator:
        """All ranks of the job, on a communicator of Tatami's own.

        Raises:
            MissingExtraError: mpi4py, or an MPI library for it, is not installed.
        """
        mpi = load_mpi(timeout_s=timeout_s)
        comm = mpi.COMM_WORLD.Dup()
        # Who shares this host is not known yet: as if all did, a wait is polite in any case.
        unknown = cls(comm, mpi=mpi, hosts=(socket.gethostname(),) * comm.Get_size(), timeout_s=timeout_s)
        places = unknown.allgather_object(ProcessPlace.here())
        world = cls(comm, mpi=mpi, hosts=tuple(place.host for place in places), timeout_s=timeout_s)
        roll_call = MpiRollCall(mpi.COMM_WORLD.Dup(), mpi=mpi, places=places, clock=world.clock)
        world.policy = replace(world.policy, roll_call=roll_call)
        say_goodbye_with(roll_call)
        return world

    def split(self, color: int | None, *, key: int = 0) -> MpiCommunicator | None:
        self._check_open("split")
        # MPI_Comm_split spins until all have come, so meet politely first.
        self.barrier()
        self._num_splits += 1
        part = self.handle.Split(self.mpi.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        members = part.Get_group().Translate_ranks(None, self.handle.Get_group())
        hosts = tuple(self.hosts[member] for member in members)
        made = MpiCommunicator(part, mpi=self.mpi, hosts=hosts, timeout_s=self.timeout_s, clock=self.clock)
        above = self.policy.members
        made.policy = replace(
            self.policy,
            lineage=f"{self.lineage}/{self._num_splits}.{color}",
            members=tuple(members) if above is None else tuple(above[member] for member in members),
        )
        self._inherit(made, members)
        self._parts = [*(each for each in self._parts if not each._closed), made]
        return made

    def close(self) -> None:
        """Also closes the parts made by `split` that are still open. MPI has some two thousand communicators to give.

        One on which a transfer was given up is not given back: MPI would hand its number out again, and what one rank sent on
        it and no rank received would come to those who have the new one.
        """
        if not self._closed:
            self._closed = True
            for each in self._parts:
                each.close()
            if not self._gave_up:
                self.handle.Free()

    def wait_rarely(self) -> None:
        self.policy = replace(self.policy, spin_s=0.0, first_sleep_s=_RARE_S, longest_sleep_s=_RARE_S)

    @property
    def roll_call(self) -> AbstractRollCall | None:
        return self.policy.roll_call

    @property
    def lineage(self) -> str:
        return self.policy.lineage

    @property
    def library(self) -> str:
        return " ".join(str(self.mpi.Get_library_version()).strip().splitlines()[0].split())

    @property
    def has_windows(self) -> bool:
        return True

    def window(
        self, size: int, dtype: torch.dtype, *, sync: Sync = Sync.PSCW, memory: torch.Tensor | None = None
    ) -> AbstractWindow:
        check_window(size, sync)
        return MpiWindow(self._window_part(), size=size, dtype=dtype, sync=sync, memory=memory)

    def shared_window(self, size: int, dtype: torch.dtype) -> AbstractSharedWindow:
        check_window(size, Sync.PSCW)
        return MpiSharedWindow(self._window_part(), size=size, dtype=dtype)

    def _window_part(self) -> MpiCommunicator:
        """For a window, which closes it: MPI must not be given back its number while the window is open."""
        part = self.duplicate()
        self._parts.remove(part)
        return part

    def abort(self, reason: str) -> Never:
        stop_all_ranks(f"rank {self.rank} of {self.size} aborted: {reason}")

    # -- point to point -----------------------------------------------------------------------------------------------

    def _takes_cuda(self) -> bool:
        return takes_cuda(self.mpi)

    def _takes(self, tensor: torch.Tensor, *, message: bool = False) -> bool:
        # MPI libraries have no nonblocking reductions of device memory; their messages are what they all have.
        return super()._takes(tensor) or (tensor.is_cuda and message and self.transport is Transport.MPI)

    def _start_send(self, tensor: torch.Tensor, dest: int, tag: int) -> AbstractRequest:
        _settle(tensor)
        requests = [self.handle.Isend(piece, dest, tag) for piece in self._pieces(tensor)]
        return MpiRequest(self, requests, operation="send", keep=(tensor,), peer=dest, tag=tag)

    def _start_recv(self, out: torch.Tensor, source: int, tag: int) -> AbstractRequest:
        _settle(out)
        requests = [self.handle.Irecv(piece, source, tag) for piece in self._pieces(out)]
        sizes = piece_sizes(out.nbytes)
        return MpiRequest(self, requests, operation="recv", keep=(out,), peer=source, tag=tag, rooms_bytes=sizes)

    def _await_tag(self, source: int) -> int:
        status = self.mpi.Status()

        def has_come() -> bool:
            return self.handle.Iprobe(source, self.mpi.ANY_TAG, status) and status.Get_tag() < MAX_TAG  # type: ignore[no-any-return]

        waiting = Waiting(operation="next_tag", rank=self.rank, size=self.size, peer=source)
        self.wait_for(has_come, lambda: waiting)
        return int(status.Get_tag())

    # -- collectives --------------------------------------------------------------------------------------------------

    def _start_barrier(self) -> AbstractRequest:
        return self._collective("barrier", self.handle.Ibarrier())

    def _start_bcast(self, tensor: torch.Tensor, root: int) -> AbstractRequest:
        return self._collective("bcast", self.handle.Ibcast(self.as_buffer(tensor), root), tensor)

    def _start_gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        target = None if out is None else self._byte_parts(out, counts)
        return self._collective("gather", self.handle.Igatherv(self.as_buffer(tensor), target, root), tensor, out)

    def _start_scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        source = None if tensor is None else self._byte_parts(tensor, counts)
        return self._collective("scatter", self.handle.Iscatterv(source, self.as_buffer(out), root), tensor, out)

    def _start_allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...]) -> AbstractRequest:
        request = self.handle.Iallgatherv(self.as_buffer(tensor), self._byte_parts(out, counts))
        return self._collective("allgather", request, tensor, out)

    def _start_alltoall(
        self, tensor: torch.Tensor, out: torch.Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...]
    ) -> AbstractRequest:
        request = self.handle.Ialltoallv(self._byte_parts(tensor, send_counts), self._byte_parts(out, recv_counts))
        return self._collective("alltoall", request, tensor, out)

    def _start_reduce(self, tensor: torch.Tensor, root: int, op: Op) -> AbstractRequest:
        mine = self.as_typed(tensor)
        source, target = (self.mpi.IN_PLACE, mine) if self.rank == root else (mine, None)
        return self._collective("reduce", self.handle.Ireduce(source, target, self.ops[op], root), tensor)

    def _start_allreduce(self, tensor: torch.Tensor, op: Op) -> AbstractRequest:
        if self.size == 2:
            return self._exchange(tensor, op)
        parts = torch.split(tensor, 2 * _PIECE_BYTES // tensor.itemsize) if tensor.nbytes > 2 * _PIECE_BYTES else (tensor,)
        requests = [self.handle.Iallreduce(self.mpi.IN_PLACE, self.as_typed(part), self.ops[op]) for part in parts]
        return MpiRequest(self, requests, operation="allreduce", keep=(tensor,))

    def _start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...], op: Op
    ) -> AbstractRequest:
        request = self.handle.Ireduce_scatter(self.as_typed(tensor), self.as_typed(out), counts, self.ops[op])
        return self._collective("reduce_scatter", request, tensor, out)

    def _exchange(self, tensor: torch.Tensor, op: Op) -> AbstractRequest:
        """Two ranks swap their tensors and both combine them: a + b is b + a to the bit."""
        peer = 1 - self.rank
        theirs = torch.empty_like(tensor)
        requests = [self.handle.Irecv(piece, peer, _OWN_TAG) for piece in self._pieces(theirs)]
        requests += [self.handle.Isend(piece, peer, _OWN_TAG) for piece in self._pieces(tensor)]
        return MpiRequest(
            self, requests, operation="allreduce", keep=(tensor, theirs), then=lambda: combine(tensor, theirs, op)
        )

    def _collective(self, operation: str, request: Any, *keep: torch.Tensor | None) -> MpiRequest:
        return MpiRequest(self, [request], operation=operation, keep=keep)

    def _pieces(self, tensor: torch.Tensor) -> list[Any]:
        sizes = piece_sizes(tensor.nbytes)
        if len(sizes) == 1:
            return [self.as_buffer(tensor)]
        address = self.mpi.buffer.fromaddress
        starts = accumulate(sizes[:-1], initial=tensor.data_ptr())
        return [[address(start, size), size, self.mpi.BYTE] for start, size in zip(starts, sizes, strict=True)]

    def _byte_parts(self, tensor: torch.Tensor, counts: tuple[int, ...]) -> list[Any]:
        sizes = [count * tensor.itemsize for count in counts]
        starts = list(accumulate(sizes[:-1], initial=0))
        return [self.memory_of(tensor), (sizes, starts), self.mpi.BYTE]


def piece_sizes(size_bytes: int) -> tuple[int, ...]:
    """The sizes of the pieces of a message, which say its size.

    The first of n > 1 pieces has 8 n bytes more than the others, and more than any message in one piece, so that one who
    expects another number of pieces sees it at once. Of as many pieces the last one differs in size.
    """
    count = (size_bytes + _PIECE_BYTES) // (_PIECE_BYTES + 8)
    if count < 2:
        return (size_bytes,)
    first = _PIECE_BYTES + 8 * count
    return (first, *[_PIECE_BYTES] * (count - 2), size_bytes - (count - 2) * _PIECE_BYTES - first)


def _settle(tensor: torch.Tensor) -> None:
    """MPI knows no streams: what the device is to do with the tensor before must be done."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
