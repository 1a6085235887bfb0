"""What all communicators share: arguments checked once, and tensors brought into the form that backends move.

A backend inherits from `CheckedCommunicator` and supplies the `_start_...` operations. They are handed arguments that are known
to be right and contiguous tensors, of the CPU unless `_takes` says more; reductions get float64, float32, int64, int32 and
uint8 only. What lies on a device passes through host memory here, and nowhere else (`tatami.comm.staging`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from tatami.comm.agreement import debugging, same_everywhere
from tatami.comm.base import AbstractRequest, parts
from tatami.comm.placed import PlacedCommunicator
from tatami.comm.reduction import HALF_DTYPES, Op
from tatami.comm.staging import from_host, host_room, is_movable, to_host
from tatami.errors import InputError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
MAX_TAG = 32767 - 1
"""MPI guarantees tags up to 32767; the last one is for the backends' own messages."""


class DoneRequest(AbstractRequest):
    """A transfer that was complete when it was asked for."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return


class ThenRequest(AbstractRequest):
    """A transfer, and what must be done once it is complete."""

    def __init__(self, request: AbstractRequest, action: Callable[[], object]) -> None:
        self._request = request
        self._action: Callable[[], object] | None = action

    def test(self) -> bool:
        if self._action is not None and self._request.test():
            self._finish()
        return self._action is None

    def wait(self) -> None:
        self._request.wait()
        self._finish()

    def _finish(self) -> None:
        if self._action is not None:
            self._action()
            self._action = None


class CheckedCommunicator(PlacedCommunicator):
    """Every public operation: check, bring into form, start it on the backend, wait, bring back.

    Raises:
        InputError: from every operation, for an invalid argument: an unknown rank, this rank itself as the peer
            of a blocking send or recv, a negative tag, counts that do not fit the sizes, a dtype or device that is not moved.
        ClosedError: from every operation after `close`.
    """

    # -- what a backend supplies ------------------------------------------------------------------------------------

    @abstractmethod
    def _start_send(self, tensor: torch.Tensor, dest: int, tag: int) -> AbstractRequest: ...

    @abstractmethod
    def _start_recv(self, out: torch.Tensor, source: int, tag: int) -> AbstractRequest: ...

    @abstractmethod
    def _await_tag(self, source: int) -> int: ...

    @abstractmethod
    def _start_barrier(self) -> AbstractRequest: ...

    @abstractmethod
    def _start_bcast(self, tensor: torch.Tensor, root: int) -> AbstractRequest: ...

    @abstractmethod
    def _start_gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest: ...

    @abstractmethod
    def _start_scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest: ...

    @abstractmethod
    def _start_allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...]) -> AbstractRequest: ...

    @abstractmethod
    def _start_alltoall(
        self, tensor: torch.Tensor, out: torch.Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...]
    ) -> AbstractRequest: ...

    @abstractmethod
    def _start_reduce(self, tensor: torch.Tensor, root: int, op: Op) -> AbstractRequest: ...

    @abstractmethod
    def _start_allreduce(self, tensor: torch.Tensor, op: Op) -> AbstractRequest: ...

    @abstractmethod
    def _start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...], op: Op
    ) -> AbstractRequest: ...

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> None:
        self._check_other("send", dest)
        self.isend(tensor, dest, tag=tag).wait()

    def recv(self, out: torch.Tensor, source: int, *, tag: int = 0) -> None:
        self._check_other("recv", source)
        self.irecv(out, source, tag=tag).wait()

    def isend(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> AbstractRequest:
        self._check_peer("send", dest, tag)
        return self._start_send(self._readable("send", tensor, message=True), dest, tag)

    def irecv(self, out: torch.Tensor, source: int, *, tag: int = 0) -> AbstractRequest:
        self._check_peer("recv", source, tag)
        self._check_tensor("recv", out)
        if out.is_contiguous() and self._takes(out, message=True):
            return self._start_recv(out.detach(), source, tag)
        room = self._writable(out, message=True)
        return ThenRequest(self._start_recv(room, source, tag), lambda: _bring_back(room, out))

    def next_tag(self, source: int) -> int:
        self._check_peer("next_tag", source, 0)
        self._check_other("next_tag", source)
        return self._await_tag(source)

    # -- collectives --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._check_open("barrier")
        self._start_barrier().wait()

    def bcast(self, tensor: torch.Tensor, *, root: int = 0) -> None:
        self._check_root("bcast", root)
        self._check_tensor("bcast", tensor)
        flat = self._form(tensor) if self.rank == root else self._writable(tensor)
        self._start_bcast(flat, root).wait()
        if self.rank != root:
            _bring_back(flat, tensor)

    def gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, *, root: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        self._check_root("gather", root)
        mine = self._readable("gather", tensor)
        if self.rank != root:
            if counts is not None:
                self._check_counts("gather", counts, mine.numel(), part=True)
            self._start_gather(mine, None, root, ()).wait()
            return
        if out is None:
            raise InputError(f"gather: rank {root} is the root and must give an `out` tensor")
        self._check_same_dtype("gather", tensor, out)
        sizes = self._counts("gather", counts, out.numel())
        self._check_part("gather", mine.numel(), sizes)
        flat = self._writable(out)
        self._start_gather(mine, flat, root, sizes).wait()
        _bring_back(flat, out)

    def scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, *, root: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        self._check_root("scatter", root)
        self._check_tensor("scatter", out)
        whole: torch.Tensor | None = None
        sizes: tuple[int, ...] = ()
        if self.rank == root:
            if tensor is None:
                raise InputError(f"scatter: rank {root} is the root and must give a tensor")
            self._check_same_dtype("scatter", tensor, out)
            whole = self._readable("scatter", tensor)
            sizes = self._counts("scatter", counts, whole.numel())
            self._check_part("scatter", out.numel(), sizes)
        elif counts is not None:
            self._check_counts("scatter", counts, out.numel(), part=True)
        flat = self._writable(out)
        self._start_scatter(whole, flat, root, sizes).wait()
        _bring_back(flat, out)

    def allgather(self, tensor: torch.Tensor, out: torch.Tensor, *, counts: Sequence[int] | None = None) -> None:
        self._check_open("allgather")
        self._check_same_dtype("allgather", tensor, out)
        mine = self._readable("allgather", tensor)
        sizes = self._counts("allgather", counts, out.numel())
        self._check_part("allgather", mine.numel(), sizes)
        flat = self._writable(out)
        self._start_allgather(mine, flat, sizes).wait()
        _bring_back(flat, out)

    def alltoall(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> None:
        self._check_open("alltoall")
        self._check_same_dtype("alltoall", tensor, out)
        mine = self._readable("alltoall", tensor)
        sends = self._counts("alltoall", send_counts, mine.numel())
        recvs = self._counts("alltoall", recv_counts, out.numel())
        if sends[self.rank] != recvs[self.rank]:
            raise InputError(
                f"alltoall: rank {self.rank} sends itself {sends[self.rank]} elements but expects {recvs[self.rank]}"
            )
        flat = self._writable(out)
        self._start_alltoall(mine, flat, sends, recvs).wait()
        _bring_back(flat, out)

    def reduce(self, tensor: torch.Tensor, *, root: int = 0, op: Op = Op.SUM) -> None:
        self._check_root("reduce", root)
        self._check_tensor("reduce", tensor)
        if self.size == 1:
            return
        form, op = _reducible(self._form(tensor), op)
        self._start_reduce(form, root, op).wait()
        if self.rank == root:
            _bring_back(form, tensor)

    def iallreduce(self, tensor: torch.Tensor, *, op: Op = Op.SUM) -> AbstractRequest:
        self._check_open("allreduce")
        self._check_tensor("allreduce", tensor)
        if self.size == 1:
            return DoneRequest()
        form, op = _reducible(self._form(tensor), op)
        request = self._start_allreduce(form, op)
        if _is_same(form, tensor):
            return request
        return ThenRequest(request, lambda: _bring_back(form, tensor))

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, *, counts: Sequence[int] | None = None, op: Op = Op.SUM
    ) -> None:
        self._check_open("reduce_scatter")
        self._check_same_dtype("reduce_scatter", tensor, out)
        sizes = self._counts("reduce_scatter", counts, tensor.numel())
        self._check_part("reduce_scatter", out.numel(), sizes)
        form, op = _reducible(self._form(tensor), op)
        part = self._writable(out)
        if form.dtype != out.dtype:
            part = torch.empty(out.shape, dtype=form.dtype, device=form.device)
        self._start_reduce_scatter(form, part, sizes, op).wait()
        _bring_back(part, out)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_rank(self, operation: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise InputError(f"{operation}: there is no rank {rank}; this communicator has ranks 0 to {self.size - 1}")

    def _check_root(self, operation: str, root: int) -> None:
        self._check_open(operation)
        self._check_rank(operation, root)
        if debugging():
            same_everywhere(self, {"root": root}, where=operation)

    def _check_peer(self, operation: str, peer: int, tag: int) -> None:
        self._check_open(operation)
        self._check_rank(operation, peer)
        if not 0 <= tag <= MAX_TAG:
            why = "; comm.next_tag(source) is the tag of what has come" if operation == "recv" else ""
            raise InputError(f"{operation}: tag {tag} is not between 0 and {MAX_TAG}{why}")

    def _check_other(self, operation: str, peer: int) -> None:
        if peer == self.rank:
            raise InputError(
                f"{operation}: rank {peer} would wait for itself forever; copy the tensor, or use isend with irecv"
            )

    def _check_tensor(self, operation: str, tensor: torch.Tensor) -> None:
        if not is_movable(tensor):
            raise InputError(f"{operation}: a tensor of the device 'meta' has a shape and no values that could be moved")
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InputError(f"{operation}: {tensor.dtype} is not moved between ranks; convert it to one of: {names}")
        if tensor.layout != torch.strided:
            raise InputError(f"{operation}: a {tensor.layout} tensor is not moved between ranks; convert it with .to_dense()")

    def _check_same_dtype(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> None:
        self._check_tensor(operation, tensor)
        self._check_tensor(operation, out)
        if tensor.dtype != out.dtype:
            raise InputError(f"{operation}: tensor is {tensor.dtype} but out is {out.dtype}; they must be the same")

    def _check_part(self, operation: str, elements: int, counts: tuple[int, ...]) -> None:
        if elements != counts[self.rank]:
            raise InputError(
                f"{operation}: the part of rank {self.rank} has {elements} elements, but its count is {counts[self.rank]} "
                f"(counts {list(counts)})"
            )

    def _check_counts(self, operation: str, counts: Sequence[int], elements: int, *, part: bool = False) -> None:
        """`counts` are one for each rank, and add up to `elements` (or this rank's is `elements`, where `part`)."""
        if len(counts) != self.size:
            raise InputError(f"{operation}: {len(counts)} counts for {self.size} ranks; give one for each")
        if min(counts) < 0:
            raise InputError(f"{operation}: a count is negative: {list(counts)}")
        if part:
            self._check_part(operation, elements, tuple(counts))
        elif sum(counts) != elements:
            raise InputError(
                f"{operation}: the counts add up to {sum(counts)} but the tensor has {elements} elements: {list(counts)}"
            )

    def _counts(self, operation: str, counts: Sequence[int] | None, elements: int) -> tuple[int, ...]:
        if counts is not None:
            self._check_counts(operation, counts, elements)
        elif elements % self.size:
            raise InputError(
                f"{operation}: {elements} elements do not divide into {self.size} equal parts; give the counts of the parts"
            )
        return parts(elements, counts, size=self.size)

    def _readable(self, operation: str, tensor: torch.Tensor, *, message: bool = False) -> torch.Tensor:
        self._check_tensor(operation, tensor)
        return self._form(tensor, message=message)

    def _form(self, tensor: torch.Tensor, *, message: bool = False) -> torch.Tensor:
        """A contiguous form of `tensor` where the backend can read it."""
        return tensor.detach().contiguous() if self._takes(tensor, message=message) else to_host(tensor)

    def _writable(self, out: torch.Tensor, *, message: bool = False) -> torch.Tensor:
        """`out` itself where it can be written through, otherwise a stand-in of its size, for `_bring_back`."""
        if not self._takes(out, message=message):
            return host_room(out)
        return out.detach() if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: (bytes,) of uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


def _is_same(form: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether what is written to `form` is in `tensor` already."""
    return form.device == tensor.device and form.data_ptr() == tensor.data_ptr()


def _bring_back(form: torch.Tensor, tensor: torch.Tensor) -> None:
    """The values of `form` into the `tensor` it stands for, unless they share their memory."""
    if not _is_same(form, tensor):
        values = form.view(torch.bool) if tensor.dtype == torch.bool and form.dtype == torch.uint8 else form
        if values.device == tensor.device:
            tensor.detach().copy_(values)
        else:
            from_host(values, tensor)


def _reducible(tensor: torch.Tensor, op: Op) -> tuple[torch.Tensor, Op]:
    """A contiguous form of `tensor` that every backend can reduce: halves as float32, bool as uint8 (where SUM means `or`)."""
    flat = tensor.detach().contiguous()
    if flat.dtype in HALF_DTYPES:
        return flat.float(), op
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8), Op.MAX if op is Op.SUM else op
    return flat, op
