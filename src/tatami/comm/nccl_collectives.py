"""Collectives of ranks of torch.distributed: NCCL's for CUDA tensors; those of tensors of the host go over TCP.

NCCL's move bytes of every dtype; only all-reduce and reduce know types. What it lacks is made of what it has: an uneven
all-gather of broadcasts, gather and scatter of an all-to-all, a reduce-scatter of an all-to-all whose parts are added in the
order of the ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tatami.comm.base import AbstractRequest, DoneRequest, ThenRequest
from tatami.comm.checked import as_bytes
from tatami.comm.mesh_collectives import AbstractMeshCommunicator
from tatami.comm.reduction import Op, combine
from tatami.comm.staging import is_on_host
from tatami.comm.transport import Transport
from tatami.comm.wait import Waiting, wait_for
from tatami.errors import CommError, CommTimeoutError

_OPS: dict[Op, Any] = (
    {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX, Op.MIN: dist.ReduceOp.MIN} if dist.is_available() else {}
)

abandoned: list[tuple[Any, Any, tuple[torch.Tensor, ...]]] = []
"""Collectives whose wait timed out, with their group and tensors: NCCL may still write there."""


class AbstractNcclCollectives(AbstractMeshCommunicator):
    """The collectives; NCCL's process group of these ranks is made on the store when needed."""

    _store: Any
    _nccl: Any = None

    def _start_bcast(self, tensor: torch.Tensor, root: int) -> AbstractRequest:
        if is_on_host(tensor):
            return super()._start_bcast(tensor, root)
        return self._works("bcast", [self._bcast_work(tensor, root)], tensor)

    def _start_gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        if is_on_host(tensor):
            return super()._start_gather(tensor, out, root, counts)
        room = torch.empty(0, dtype=tensor.dtype, device=tensor.device) if out is None else out
        recv_counts = counts or (0,) * self.size
        return self._exchange("gather", tensor, room, self._only(root, tensor.numel()), recv_counts)

    def _start_scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        if is_on_host(out):
            return super()._start_scatter(tensor, out, root, counts)
        whole = torch.empty(0, dtype=out.dtype, device=out.device) if tensor is None else tensor
        return self._exchange("scatter", whole, out, counts or (0,) * self.size, self._only(root, out.numel()))

    def _start_allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...]) -> AbstractRequest:
        if is_on_host(out):
            return super()._start_allgather(tensor, out, counts)
        rooms = torch.split(out.view(-1), list(counts))
        rooms[self.rank].copy_(tensor.view(-1))
        # Begun together they are one operation to NCCL, which would otherwise carry them out one after the other. All ranks
        # begin the same ones in the same order, whatever they have themselves; one of nothing is left out.
        group = self._group()
        group._start_coalescing()
        for root, count in enumerate(counts):
            if count:
                self._bcast_work(rooms[root], root)
        return self._works("allgather", [group._end_coalescing()], out)

    def _start_alltoall(
        self, tensor: torch.Tensor, out: torch.Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...]
    ) -> AbstractRequest:
        if is_on_host(out):
            return super()._start_alltoall(tensor, out, send_counts, recv_counts)
        return self._exchange("alltoall", tensor, out, send_counts, recv_counts)

    def _start_reduce(self, tensor: torch.Tensor, root: int, op: Op) -> AbstractRequest:
        if is_on_host(tensor):
            return super()._start_reduce(tensor, root, op)
        # NCCL may leave parts of the result in the tensors of all ranks.
        mine = tensor if self.rank == root else tensor.clone()
        options = dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, _OPS[op]
        return self._works("reduce", [self._group().reduce([mine], options)], mine) if mine.numel() else DoneRequest()

    def _start_allreduce(self, tensor: torch.Tensor, op: Op, *, operation: str = "allreduce") -> AbstractRequest:
        if is_on_host(tensor):
            return super()._start_allreduce(tensor, op, operation=operation)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._works(operation, [self._group().allreduce([tensor], options)], tensor) if tensor.numel() else DoneRequest()

    def _start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...], op: Op
    ) -> AbstractRequest:
        if is_on_host(out):
            return super()._start_reduce_scatter(tensor, out, counts, op)
        came = torch.empty(self.size, out.numel(), dtype=out.dtype, device=out.device)

        def add_up() -> None:
            for values in came[1:]:
                combine(came[0], values, op)
            out.view(-1).copy_(came[0])

        return ThenRequest(self._exchange("reduce_scatter", tensor, came, counts, (out.numel(),) * self.size), add_up)

    # -- what they are made of ------------------------------------------------------------------------------------------

    def _exchange(
        self, operation: str, tensor: torch.Tensor, out: torch.Tensor, sends: tuple[int, ...], recvs: tuple[int, ...]
    ) -> AbstractRequest:
        """An all-to-all of elements, as bytes."""
        given, room = as_bytes(tensor), as_bytes(out)
        recv_bytes, send_bytes = [count * out.itemsize for count in recvs], [count * out.itemsize for count in sends]
        work = self._group().alltoall_base(room, given, recv_bytes, send_bytes, dist.AllToAllOptions())
        return self._works(operation, [work], given, room)

    def _bcast_work(self, tensor: torch.Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group().broadcast([as_bytes(tensor)], options)

    def _works(self, operation: str, works: list[Any], *keep: torch.Tensor) -> WorkRequest:
        return WorkRequest(self, works, self._nccl, operation, *keep)

    def _only(self, peer: int, count: int) -> tuple[int, ...]:
        """`count` elements to or from `peer`, none for the others."""
        return tuple(count if rank == peer else 0 for rank in range(self.size))

    def _group(self) -> Any:
        if self._nccl is None:
            make: Any = dist.ProcessGroupNCCL
            options = make.Options()
            # A rank that does not come is found here first; NCCL's own watchdog, which ends the process, is the last resort.
            options._timeout = timedelta(seconds=2 * self.timeout_s)
            self._nccl = make(c10d.PrefixStore(f"{self._name}/nccl", self._store), self.rank, self.size, options)
        return self._nccl

    def _has_nccl(self) -> bool:
        return bool(dist.is_nccl_available())

    def _takes(self, tensor: torch.Tensor, *, message: bool = False) -> bool:
        return super()._takes(tensor) or (tensor.is_cuda and not message and self.transport is Transport.NCCL)


class WorkRequest(AbstractRequest):
    """Works of one collective of NCCL, complete together."""

    def __init__(
        self, communicator: AbstractNcclCollectives, works: list[Any], group: Any, operation: str, *keep: torch.Tensor
    ) -> None:
        self._communicator = communicator
        self._works = works
        self._group = group
        self._waiting = Waiting(operation=operation, rank=communicator.rank, size=communicator.size)
        self._keep = keep

    def test(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            if self._communicator.mesh.is_busy:  # with messages that others may wait for before they join in
                self._communicator.mesh.progress(0.0, is_over=lambda: False)
            return False
        self._finish()
        return True

    def wait(self) -> None:
        communicator = self._communicator
        timeout_s, policy = communicator.timeout_s, communicator.policy
        try:
            wait_for(self.test, lambda: self._waiting, policy=policy, timeout_s=timeout_s, clock=communicator.clock)
        except CommTimeoutError:
            abandoned.append((self._works, self._group, self._keep))
            raise

    def _finish(self) -> None:
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise CommError(
                f"{self._waiting.describe()}: a rank has ended, or the link to it broke: {said_by(error)}"
            ) from error


def said_by(error: RuntimeError) -> str:
    """What torch's store, or NCCL, says, without the place in its source."""
    return str(error).rpartition("] ")[2].partition(" This is typically")[0]
