"""What a communicator is: it moves bytes between ranks, and knows no model, no optimizer, no dataset.

Arguments are checked once, here, and tensors brought into the form that backends move. A backend supplies the `_start_...`
operations. They are handed arguments that are known to be right and contiguous tensors, of the CPU unless `_takes` says more;
reductions get float64, float32, int64, int32 and uint8 only. What lies on a device passes through host memory here, and nowhere
else (`tatami.comm.staging`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from tatami.collective import Sync
from tatami.comm.agreement import debugging, same_everywhere
from tatami.comm.checked import MAX_TAG, bring_back, check_same_dtype, check_tensor, is_same, reducible
from tatami.comm.objects import HEAD_BYTES, all_unpickled, bytes_room, pickled, rest_bytes, unpickled
from tatami.comm.ranks import AbstractRanks
from tatami.comm.reduction import Op
from tatami.comm.staging import host_room, to_host
from tatami.comm.window import AbstractSharedWindow, AbstractWindow, refuse_windows
from tatami.errors import InputError


class AbstractRequest(ABC):
    """A transfer under way. The tensors it was given must stay untouched until `wait` returns."""

    @abstractmethod
    def test(self) -> bool:
        """Whether it is done; never blocks. Makes progress."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is done.

        Raises:
            CommTimeoutError: it was not done within the communicator's timeout; names operation, peer and tag.
            RankDiedError: the peer ended first.
        """


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


class AbstractCommunicator(AbstractRanks):
    """Ranks that can talk to each other, and the operations they talk with.

    Tensors are of any shape and of dtype float64, float32, bfloat16, float16, int64, int32, uint8 or bool. Contiguous ones of
    the CPU are used where they lie, without a copy; those of a device pass through host memory, unless `use_device` found that
    these ranks can do without. `out` tensors are written in place. Sums of bfloat16 and float16
    are taken in float32. Collectives must be called by all ranks in the same order. All waits end: after `timeout_s` seconds
    with a `CommTimeoutError`, or with a `RankDiedError` where the death of a peer is known.

    Sizes in `counts` are numbers of elements, one for each rank, and may differ and be zero. `None` means equal parts.

    Raises:
        InputError: from every operation, for an invalid argument: an unknown rank, this rank itself as the peer
            of a blocking send or recv, a negative tag, counts that do not fit the sizes, a dtype or device that is not moved.
        ClosedError: from every operation after `close`.
    """

    # -- parts and the end --------------------------------------------------------------------------------------------

    @abstractmethod
    def split(self, color: int | None, *, key: int = 0) -> AbstractCommunicator | None:
        """One communicator for each color, ranks ordered by (key, rank); None for ranks whose color is None. Collective."""

    def subgroup(self, ranks: Sequence[int]) -> AbstractCommunicator | None:
        """One communicator of these ranks, in this order, where each of them gives the same; None of no ranks. Collective.

        As `split`, for where ranks know with whom they belong together: backends that need no messages for it send none.
        """
        return self.split(min(ranks), key=ranks.index(self.rank)) if ranks else self.split(None)

    def duplicate(self) -> Self:
        """The same ranks in the same order on another communicator, whose messages never meet those of this one. Collective."""
        other = self.split(0, key=self.rank)
        assert isinstance(other, type(self)), f"{type(self).__name__}.split made a {type(other).__name__}"
        return other

    def wait_rarely(self) -> None:
        """From now on, and in parts made later on, look so rarely for what has come that looking costs next to no CPU time.

        For measurements of CPU time.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what the communicator holds. Later operations raise `ClosedError`."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End all ranks of the job because this one cannot go on. `reason` is printed."""

    def check_peers(self) -> None:
        """For waits on memory: costs little, returns at once.

        Raises:
            RankDiedError: where the death of a rank is known.
        """

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> None:
        """Send to rank `dest`, and return when `tensor` may be written again. Messages of one `tag` keep their order."""
        self._check_other("send", dest)
        self.isend(tensor, dest, tag=tag).wait()

    def recv(self, out: torch.Tensor, source: int, *, tag: int = 0) -> None:
        """Fill `out`, of the shape and dtype that rank `source` sends with this `tag`."""
        self._check_other("recv", source)
        self.irecv(out, source, tag=tag).wait()

    def isend(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> AbstractRequest:
        """As `send`, without waiting: `tensor` must stay as it is until `wait` of what is returned."""
        self._check_peer("send", dest, tag)
        return self._start_send(self._readable("send", tensor, message=True), dest, tag)

    def irecv(self, out: torch.Tensor, source: int, *, tag: int = 0) -> AbstractRequest:
        """As `recv`, without waiting: `out` is filled after `wait` of what is returned."""
        self._check_peer("recv", source, tag)
        check_tensor("recv", out)
        if out.is_contiguous() and self._takes(out, message=True):
            return self._start_recv(out.detach(), source, tag)
        room = self._writable(out, message=True)
        return ThenRequest(self._start_recv(room, source, tag), lambda: bring_back(room, out))

    def next_tag(self, source: int) -> int:
        """The tag of the oldest message from rank `source` that was not received yet; waits until there is one.

        tag = comm.next_tag(1)
        value = comm.recv_object(1, tag=tag)     # whatever its tag is
        """
        self._check_peer("next_tag", source, 0)
        self._check_other("next_tag", source)
        return self._await_tag(source)

    # -- collectives --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._check_open("barrier")
        self._start_barrier().wait()

    def bcast(self, tensor: torch.Tensor, *, root: int = 0) -> None:
        """`tensor` of `root` into `tensor` of everyone, in place."""
        self._check_root("bcast", root)
        check_tensor("bcast", tensor)
        flat = self._form(tensor) if self.rank == root else self._writable(tensor)
        self._start_bcast(flat, root).wait()
        if self.rank != root:
            bring_back(flat, tensor)

    def gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, *, root: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        """All ranks' `tensor`, one after the other, into `out` of `root`; `out` is None elsewhere."""
        self._check_root("gather", root)
        mine = self._readable("gather", tensor)
        if self.rank != root:
            self._check_own_count("gather", counts, mine.numel())
            self._start_gather(mine, None, root, ()).wait()
            return
        if out is None:
            raise InputError(f"gather: rank {root} is the root and must give an `out` tensor")
        check_same_dtype("gather", tensor, out)
        sizes = self._counts("gather", counts, out.numel())
        self._check_part("gather", mine.numel(), sizes)
        flat = self._writable(out)
        self._start_gather(mine, flat, root, sizes).wait()
        bring_back(flat, out)

    def scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, *, root: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        """Part `rank` of `root`'s `tensor` into `out` of `rank`; `tensor` is None elsewhere."""
        self._check_root("scatter", root)
        check_tensor("scatter", out)
        whole: torch.Tensor | None = None
        sizes: tuple[int, ...] = ()
        if self.rank == root:
            if tensor is None:
                raise InputError(f"scatter: rank {root} is the root and must give a tensor")
            check_same_dtype("scatter", tensor, out)
            whole = self._readable("scatter", tensor)
            sizes = self._counts("scatter", counts, whole.numel())
            self._check_part("scatter", out.numel(), sizes)
        else:
            self._check_own_count("scatter", counts, out.numel())
        flat = self._writable(out)
        self._start_scatter(whole, flat, root, sizes).wait()
        bring_back(flat, out)

    def allgather(self, tensor: torch.Tensor, out: torch.Tensor, *, counts: Sequence[int] | None = None) -> None:
        """All ranks' `tensor`, one after the other, into all ranks' `out`."""
        self._check_open("allgather")
        check_same_dtype("allgather", tensor, out)
        mine = self._form(tensor)
        sizes = self._counts("allgather", counts, out.numel())
        self._check_part("allgather", mine.numel(), sizes)
        flat = self._writable(out)
        self._start_allgather(mine, flat, sizes).wait()
        bring_back(flat, out)

    def alltoall(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> None:
        """Part j of `tensor` to rank j; what came from rank i becomes part i of `out`."""
        self._check_open("alltoall")
        check_same_dtype("alltoall", tensor, out)
        mine = self._form(tensor)
        sends = self._counts("alltoall", send_counts, mine.numel())
        recvs = self._counts("alltoall", recv_counts, out.numel())
        if sends[self.rank] != recvs[self.rank]:
            raise InputError(
                f"alltoall: rank {self.rank} sends itself {sends[self.rank]} elements but expects {recvs[self.rank]}"
            )
        flat = self._writable(out)
        self._start_alltoall(mine, flat, sends, recvs).wait()
        bring_back(flat, out)

    def reduce(self, tensor: torch.Tensor, *, root: int = 0, op: Op = Op.SUM) -> None:
        """The reduction of all ranks' `tensor` into `tensor` of `root`, in place; other ranks' tensors stay as they are."""
        self._check_root("reduce", root)
        check_tensor("reduce", tensor)
        if self.size == 1:
            return
        form, op = reducible(self._form(tensor), op)
        self._start_reduce(form, root, op).wait()
        if self.rank == root:
            bring_back(form, tensor)

    def iallreduce(self, tensor: torch.Tensor, *, op: Op = Op.SUM) -> AbstractRequest:
        """Begin an all-reduce in place; it is complete when the request is."""
        self._check_open("allreduce")
        check_tensor("allreduce", tensor)
        if self.size == 1:
            return DoneRequest()
        form, op = reducible(self._form(tensor), op)
        request = self._start_allreduce(form, op)
        if is_same(form, tensor):
            return request
        return ThenRequest(request, lambda: bring_back(form, tensor))

    def allreduce(self, tensor: torch.Tensor, *, op: Op = Op.SUM) -> None:
        """The reduction of all ranks' `tensor` into all ranks' `tensor`, in place; the same bits on every rank."""
        self.iallreduce(tensor, op=op).wait()

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, *, counts: Sequence[int] | None = None, op: Op = Op.SUM
    ) -> None:
        """Part `rank` of the reduction of all ranks' `tensor` into `out`."""
        self._check_open("reduce_scatter")
        check_same_dtype("reduce_scatter", tensor, out)
        sizes = self._counts("reduce_scatter", counts, tensor.numel())
        self._check_part("reduce_scatter", out.numel(), sizes)
        form, op = reducible(self._form(tensor), op)
        part = self._writable(out)
        if form.dtype != out.dtype:
            part = torch.empty(out.shape, dtype=form.dtype, device=form.device)
        self._start_reduce_scatter(form, part, sizes, op).wait()
        bring_back(part, out)

    # -- windows: see `tatami.comm.window` -------------------------------------------------------------------------

    @property
    def has_windows(self) -> bool:
        """Whether `window` and `shared_window` are available."""
        return False

    def window(
        self,
        size: int,  # noqa: ARG002 - for those that have windows
        dtype: torch.dtype,  # noqa: ARG002
        *,
        sync: Sync = Sync.PSCW,  # noqa: ARG002
        memory: torch.Tensor | None = None,  # noqa: ARG002
    ) -> AbstractWindow:
        """A window of `size` elements for puts, gets and accumulates; over `memory` where that is given. Collective.

        Raises:
            InputError: this backend has no one-sided communication; the MPI backend has.
        """
        raise refuse_windows(type(self).__name__)

    def shared_window(self, size: int, dtype: torch.dtype) -> AbstractSharedWindow:  # noqa: ARG002
        """A window of `size` elements for each rank in the memory of their one host. Collective.

        Raises:
            InputError: this backend has none, or the ranks are on several hosts.
        """
        raise refuse_windows(type(self).__name__)

    # -- objects: see `tatami.comm.objects`; only ever between ranks that the user started ------------------------------

    def send_object(self, value: Any, dest: int, *, tag: int = 0) -> None:
        """Send anything that can be pickled to rank `dest`."""
        head, rest = pickled(value)
        self.send(head, dest, tag=tag)
        if rest.numel():
            self.send(rest, dest, tag=tag)

    def recv_object(self, source: int, *, tag: int = 0) -> Any:
        """What rank `source` sent by `send_object` with this `tag`."""
        head = bytes_room(HEAD_BYTES)
        self.recv(head, source, tag=tag)
        rest = bytes_room(rest_bytes(head))
        if rest.numel():
            self.recv(rest, source, tag=tag)
        return unpickled(head, rest)

    def bcast_object(self, value: Any, *, root: int = 0) -> Any:
        head, rest = pickled(value) if self.rank == root else (bytes_room(HEAD_BYTES), bytes_room(0))
        self.bcast(head, root=root)
        if self.rank != root:
            rest = bytes_room(rest_bytes(head))
        if rest.numel():
            self.bcast(rest, root=root)
        return value if self.rank == root else unpickled(head, rest)

    def allgather_object(self, value: Any) -> list[Any]:
        head, rest = pickled(value)
        heads = bytes_room(self.size * HEAD_BYTES)
        self.allgather(head, heads)
        counts = [rest_bytes(each) for each in torch.split(heads, HEAD_BYTES)]
        rests = bytes_room(sum(counts))
        if rests.numel():
            self.allgather(rest, rests, counts=counts)
        return all_unpickled(heads, rests, counts)

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """All ranks' `value` on `root`, None elsewhere."""
        head, rest = pickled(value)
        if self.rank != root:
            self.gather(head, None, root=root)
            self.gather(rest, None, root=root)
            return None
        heads = bytes_room(self.size * HEAD_BYTES)
        self.gather(head, heads, root=root)
        counts = [rest_bytes(each) for each in torch.split(heads, HEAD_BYTES)]
        rests = bytes_room(sum(counts))
        self.gather(rest, rests, root=root, counts=counts)  # also where all are empty: only the root knows that
        return all_unpickled(heads, rests, counts)

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

    # -- checks and forms ---------------------------------------------------------------------------------------------

    def _check_root(self, operation: str, root: int) -> None:
        self._check_rank(operation, root)
        if debugging():
            same_everywhere(self, {"root": root}, where=operation)

    def _check_peer(self, operation: str, peer: int, tag: int) -> None:
        self._check_rank(operation, peer)
        if not 0 <= tag <= MAX_TAG:
            why = "; comm.next_tag(source) is the tag of what has come" if operation == "recv" else ""
            raise InputError(f"{operation}: tag {tag} is not between 0 and {MAX_TAG}{why}")

    def _check_own_count(self, operation: str, counts: Sequence[int] | None, elements: int) -> None:
        """Where the others' sizes are not known here."""
        if counts is not None:
            self._check_counts(operation, counts)
            self._check_part(operation, elements, counts)

    def _readable(self, operation: str, tensor: torch.Tensor, *, message: bool = False) -> torch.Tensor:
        check_tensor(operation, tensor)
        return self._form(tensor, message=message)

    def _form(self, tensor: torch.Tensor, *, message: bool = False) -> torch.Tensor:
        """A contiguous form of `tensor` where the backend can read it."""
        return tensor.detach().contiguous() if self._takes(tensor, message=message) else to_host(tensor)

    def _writable(self, out: torch.Tensor, *, message: bool = False) -> torch.Tensor:
        """`out` itself where it can be written through, otherwise a stand-in of its size, for `bring_back`."""
        if not self._takes(out, message=message):
            return host_room(out)
        return out.detach() if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
