"""Behaviour added by wrapping: a communicator that passes every operation on, and has a hook that runs before each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from tatami.collective import Sync
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.reduction import Op
from tatami.comm.refusals import Refusals
from tatami.comm.stall_report import AbstractRollCall
from tatami.comm.transport import Route, Transport
from tatami.comm.window import AbstractSharedWindow, AbstractWindow


class WrappedCommunicator(AbstractCommunicator):
    """Hands everything on to `inner`, after `_before` was told. Parts made by `split` are wrapped in the same way.

    `send` and `recv` are told as such, not again as the `isend` and `irecv` they are made of. What `_before` raises,
    the operation raises, and does not begin.
    """

    def __init__(self, inner: AbstractCommunicator) -> None:
        self.inner = inner

    @abstractmethod
    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:
        """`operation` is the name of the method; `peer` the other rank or the root; `tensor` what this rank gives, or None."""

    @abstractmethod
    def _wrap(self, part: AbstractCommunicator) -> Self:
        """A wrapper like this one, around a part of the ranks."""

    @property
    def timeout_s(self) -> float:
        return self.inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.inner.timeout_s = timeout_s

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.inner.hosts

    @property
    def library(self) -> str:
        return self.inner.library

    @property
    def roll_call(self) -> AbstractRollCall | None:
        return self.inner.roll_call

    @property
    def refusals(self) -> Refusals | None:
        return self.inner.refusals

    @property
    def lineage(self) -> str:
        return self.inner.lineage

    @property
    def has_windows(self) -> bool:
        return self.inner.has_windows

    def window(
        self, size: int, dtype: torch.dtype, *, sync: Sync = Sync.PSCW, memory: torch.Tensor | None = None
    ) -> AbstractWindow:
        self._before("window", tensor=memory)
        return self.inner.window(size, dtype, sync=sync, memory=memory)

    def shared_window(self, size: int, dtype: torch.dtype) -> AbstractSharedWindow:
        self._before("shared_window")
        return self.inner.shared_window(size, dtype)

    def split(self, color: int | None, *, key: int = 0) -> Self | None:
        self._before("split")
        part = self.inner.split(color, key=key)
        return None if part is None else self._wrap(part)

    def use_device(self, device: torch.device | str) -> Route:
        self._before("use_device")
        return self.inner.use_device(device)

    def wait_rarely(self) -> None:
        self.inner.wait_rarely()

    @property
    def device(self) -> torch.device | None:
        return self.inner.device

    @property
    def transport(self) -> Transport:
        return self.inner.transport

    @property
    def on_devices(self) -> bool:
        return self.inner.on_devices

    def describe(self) -> str:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()

    @property
    def is_closed(self) -> bool:
        return self.inner.is_closed

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def send(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> None:
        self._before("send", peer=dest, tensor=tensor)
        self.inner.send(tensor, dest, tag=tag)

    def recv(self, out: torch.Tensor, source: int, *, tag: int = 0) -> None:
        self._before("recv", peer=source)
        self.inner.recv(out, source, tag=tag)

    def isend(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> AbstractRequest:
        self._before("isend", peer=dest, tensor=tensor)
        return self.inner.isend(tensor, dest, tag=tag)

    def irecv(self, out: torch.Tensor, source: int, *, tag: int = 0) -> AbstractRequest:
        self._before("irecv", peer=source)
        return self.inner.irecv(out, source, tag=tag)

    def next_tag(self, source: int) -> int:
        self._before("next_tag", peer=source)
        return self.inner.next_tag(source)

    def barrier(self) -> None:
        self._before("barrier")
        self.inner.barrier()

    def bcast(self, tensor: torch.Tensor, *, root: int = 0) -> None:
        self._before("bcast", peer=root, tensor=tensor if self.rank == root else None)
        self.inner.bcast(tensor, root=root)

    def gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, *, root: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        self._before("gather", peer=root, tensor=tensor)
        self.inner.gather(tensor, out, root=root, counts=counts)

    def scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, *, root: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        self._before("scatter", peer=root, tensor=tensor)
        self.inner.scatter(tensor, out, root=root, counts=counts)

    def allgather(self, tensor: torch.Tensor, out: torch.Tensor, *, counts: Sequence[int] | None = None) -> None:
        self._before("allgather", tensor=tensor)
        self.inner.allgather(tensor, out, counts=counts)

    def alltoall(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> None:
        self._before("alltoall", tensor=tensor)
        self.inner.alltoall(tensor, out, send_counts=send_counts, recv_counts=recv_counts)

    def reduce(self, tensor: torch.Tensor, *, root: int = 0, op: Op = Op.SUM) -> None:
        self._before("reduce", peer=root, tensor=tensor)
        self.inner.reduce(tensor, root=root, op=op)

    def iallreduce(self, tensor: torch.Tensor, *, op: Op = Op.SUM) -> AbstractRequest:
        self._before("iallreduce", tensor=tensor)
        return self.inner.iallreduce(tensor, op=op)

    def allreduce(self, tensor: torch.Tensor, *, op: Op = Op.SUM) -> None:
        self._before("allreduce", tensor=tensor)
        self.inner.allreduce(tensor, op=op)

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, *, counts: Sequence[int] | None = None, op: Op = Op.SUM
    ) -> None:
        self._before("reduce_scatter", tensor=tensor)
        self.inner.reduce_scatter(tensor, out, counts=counts, op=op)

    def send_object(self, value: Any, dest: int, *, tag: int = 0) -> None:
        self._before("send_object", peer=dest)
        self.inner.send_object(value, dest, tag=tag)

    def recv_object(self, source: int, *, tag: int = 0) -> Any:
        self._before("recv_object", peer=source)
        return self.inner.recv_object(source, tag=tag)

    def bcast_object(self, value: Any, *, root: int = 0) -> Any:
        self._before("bcast_object", peer=root)
        return self.inner.bcast_object(value, root=root)

    def allgather_object(self, value: Any) -> list[Any]:
        self._before("allgather_object")
        return self.inner.allgather_object(value)

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        self._before("gather_object", peer=root)
        return self.inner.gather_object(value, root=root)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operation begun on this rank.

    Attributes:
        operation: the name of the communicator's method.
        peer: the other rank, or the root; None for collectives without one.
        size_bytes: of the tensor this rank gave; 0 where it only receives. Objects are not measured: 0.
    """

    operation: str
    peer: int | None
    size_bytes: int


class Recording(WrappedCommunicator):
    """Notes every operation in `calls`, in order. Parts made by `split` note theirs in the same list."""

    def __init__(self, inner: AbstractCommunicator, *, calls: list[Call] | None = None) -> None:
        super().__init__(inner)
        self.calls: list[Call] = [] if calls is None else calls

    def num_messages(self, operation: str, *, peer: int | None = None) -> int:
        """How often `operation` was begun; only with `peer`, where one is given."""
        return len(self._matching(operation, peer))

    def size_bytes(self, operation: str, *, peer: int | None = None) -> int:
        """The bytes this rank gave to `operation`; only with `peer`, where one is given."""
        return sum(call.size_bytes for call in self._matching(operation, peer))

    def _matching(self, operation: str, peer: int | None) -> list[Call]:
        return [call for call in self.calls if call.operation == operation and (peer is None or call.peer == peer)]

    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:
        self.calls.append(Call(operation=operation, peer=peer, size_bytes=0 if tensor is None else tensor.nbytes))

    def _wrap(self, part: AbstractCommunicator) -> Self:
        return type(self)(part, calls=self.calls)
