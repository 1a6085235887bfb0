"""Collectives of ranks of torch.distributed: gloo's for CPU tensors, NCCL's for CUDA tensors.

They move bytes of every dtype; only all-reduce and reduce know types. What gloo or NCCL lacks is made of what both have: an
uneven all-gather of broadcasts, gather and scatter of an all-to-all, a reduce-scatter of an all-to-all whose parts are added in
the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tatami.comm.base import AbstractRequest
from tatami.comm.checked import MAX_TAG, DoneRequest, ThenRequest, as_bytes
from tatami.comm.reduction import Op, combine
from tatami.comm.staging import is_on_host
from tatami.comm.torchdist_waits import AbstractTorchdistWaits, MessageRequest, WorkRequest
from tatami.comm.transport import Transport, gather_roots
from tatami.comm.wait import Waiting

_FEW_BYTES, _FEW_RANKS = 4096, 16
"""Sums of so few numbers of so few ranks go from each to each. Of 4096 bytes: 0.2 ms of a core among 2 ranks (1.1 with gloo),
0.7 among 8 (4.3), 1.6 among 16 (7.6). More bytes would be too many for thin links, over which each goes to all others."""
_OWN_TAG = MAX_TAG + 1
_OPS: dict[Op, Any] = (
    {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX, Op.MIN: dist.ReduceOp.MIN} if dist.is_available() else {}
)


class AbstractTorchdistCollectives(AbstractTorchdistWaits):
    """The collectives, on two process groups of these ranks: gloo's, and NCCL's, made on the store when needed."""

    _store: Any
    _gloo: Any
    _nccl: Any = None

    def _start_barrier(self) -> AbstractRequest:
        return self._start_allreduce(torch.zeros(1, dtype=torch.float32, device="cpu"), Op.SUM, operation="barrier")

    def _start_bcast(self, tensor: torch.Tensor, root: int) -> AbstractRequest:
        return self._works("bcast", [self._bcast_work(tensor, root)], tensor)

    def _start_gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        room = torch.empty(0, dtype=tensor.dtype, device=tensor.device) if out is None else out
        recv_counts = counts or (0,) * self.size
        return self._exchange("gather", tensor, room, self._only(root, tensor.numel()), recv_counts)

    def _start_scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        whole = torch.empty(0, dtype=out.dtype, device=out.device) if tensor is None else tensor
        return self._exchange("scatter", whole, out, counts or (0,) * self.size, self._only(root, out.numel()))

    def _start_allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...]) -> AbstractRequest:
        rooms = torch.split(out.view(-1), list(counts))
        rooms[self.rank].copy_(tensor.view(-1))
        with self._grouped(out) as works:
            works += [self._bcast_work(rooms[root], root) for root in gather_roots(counts)]
        return self._works("allgather", works, out)

    def _start_alltoall(
        self, tensor: torch.Tensor, out: torch.Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...]
    ) -> AbstractRequest:
        return self._exchange("alltoall", tensor, out, send_counts, recv_counts)

    def _start_reduce(self, tensor: torch.Tensor, root: int, op: Op) -> AbstractRequest:
        # Gloo leaves parts of the result in the tensors of all ranks.
        mine = tensor if self.rank == root else tensor.clone()
        options = dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, _OPS[op]
        return self._works("reduce", [self._group(mine).reduce([mine], options)], mine) if mine.numel() else DoneRequest()

    def _start_allreduce(self, tensor: torch.Tensor, op: Op, *, operation: str = "allreduce") -> AbstractRequest:
        if not tensor.numel():
            return DoneRequest()
        if is_on_host(tensor) and tensor.nbytes <= _FEW_BYTES and self.size <= _FEW_RANKS:
            return self._reduce_directly(tensor, op, operation=operation)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._works(operation, [self._group(tensor).allreduce([tensor], options)], tensor)

    def _reduce_directly(self, tensor: torch.Tensor, op: Op, *, operation: str) -> AbstractRequest:
        """Each to each: each of 8 ranks on 2 cores spends 0.7 ms of a core on it; with gloo, by way of its thread, 1.3 ms."""
        came = torch.empty(self.size, tensor.numel(), dtype=tensor.dtype, device="cpu")
        came[self.rank] = tensor.view(-1)
        others = [(self.rank + away) % self.size for away in range(1, self.size)]
        transfers = [self._receiving(came[rank], rank, _OWN_TAG) for rank in others]
        transfers += [self._sending(came[self.rank], rank, _OWN_TAG) for rank in others]

        def add_up() -> None:
            # In the order of the ranks: the same bits everywhere.
            tensor.view(-1).copy_(came[0])
            for values in came[1:]:
                combine(tensor.view(-1), values, op)

        waiting = Waiting(operation=operation, rank=self.rank, size=self.size)
        return MessageRequest(self, waiting, transfers, then=add_up)

    def _start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...], op: Op
    ) -> AbstractRequest:
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
        work = self._group(out).alltoall_base(room, given, recv_bytes, send_bytes, dist.AllToAllOptions())
        return self._works(operation, [work], given, room)

    def _bcast_work(self, tensor: torch.Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group(tensor).broadcast([as_bytes(tensor)], options)

    @contextmanager
    def _grouped(self, tensor: torch.Tensor) -> Iterator[list[Any]]:
        """Works that are begun together: to NCCL one operation, which would otherwise carry them out one after the other."""
        works: list[Any] = []
        if is_on_host(tensor):
            yield works
            return
        group = self._group(tensor)
        group._start_coalescing()
        yield works
        works[:] = [group._end_coalescing()]

    def _works(self, operation: str, works: list[Any], *keep: torch.Tensor) -> WorkRequest:
        return WorkRequest(self, works, self._gloo, operation, *keep)

    def _only(self, peer: int, count: int) -> tuple[int, ...]:
        """`count` elements to or from `peer`, none for the others."""
        return tuple(count if rank == peer else 0 for rank in range(self.size))

    def _group(self, tensor: torch.Tensor) -> Any:
        if is_on_host(tensor):
            return self._gloo
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
