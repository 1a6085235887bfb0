"""What a communicator is: it moves bytes between ranks, and knows no model, no optimizer, no dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self, TypeVar

import torch

from tatami.collective import Sync
from tatami.comm.reduction import Op
from tatami.comm.refusals import Refusals
from tatami.comm.stall_report import AbstractRollCall
from tatami.comm.transport import Route, Transport
from tatami.comm.window import AbstractSharedWindow, AbstractWindow, refuse_windows

Attached = TypeVar("Attached")

DEFAULT_TIMEOUT_S = 60.0


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


class AbstractCommunicator(ABC):
    """Ranks that can talk to each other, and the operations they talk with.

    Tensors are of any shape and of dtype float64, float32, bfloat16, float16, int64, int32, uint8 or bool. Contiguous ones of
    the CPU are used where they lie, without a copy; those of a device pass through host memory, unless `use_device` found that
    these ranks can do without. `out` tensors are written in place. Sums of bfloat16 and float16
    are taken in float32. Collectives must be called by all ranks in the same order. All waits end: after `timeout_s` seconds
    with a `CommTimeoutError`, or with a `RankDiedError` where the death of a peer is known.

    Sizes in `counts` are numbers of elements, one for each rank, and may differ and be zero. `None` means equal parts.
    """

    timeout_s: float = DEFAULT_TIMEOUT_S

    # -- who ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @property
    @abstractmethod
    def hosts(self) -> tuple[str, ...]:
        """The host name of every rank."""

    @property
    def library(self) -> str:
        """What moves the bytes, with its version."""
        return type(self).__name__

    @property
    def roll_call(self) -> AbstractRollCall | None:
        """The stall report: ranks ask each other what they do when a message does not arrive; None where there is none."""
        return None

    @property
    def refusals(self) -> Refusals | None:
        """The failures of other ranks, for `fail_together`; None where ranks have no way to send them."""
        return None if self.roll_call is None else self.roll_call.refusals

    @property
    def lineage(self) -> str:
        """The name of this communicator, the same on its ranks; those of its parts begin with it and a slash."""
        return ""

    @property
    def changes(self) -> bool:
        """Whether ranks may leave and join while this object stays: see `tatami.comm.elastic`."""
        return False

    @property
    def group(self) -> int:
        """How often the ranks have changed, as far as this one has seen; a death that was repaired is a change."""
        return 0

    @property
    def local_rank(self) -> int:
        """This rank among those of its own host."""
        return sum(host == self.hosts[self.rank] for host in self.hosts[: self.rank])

    @property
    def local_size(self) -> int:
        """How many ranks its own host has."""
        return self.hosts.count(self.hosts[self.rank])

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

    def wait_rarely(self) -> None:  # noqa: B027 -- nothing is to be done where waits block
        """From now on, and in parts made later on, look so rarely for what has come that looking costs next to no CPU time.

        For measurements of CPU time.
        """

    @cached_property
    def _attached(self) -> dict[type, Any]:
        return {}

    def attached(self, kind: type[Attached], make: Callable[[Self], Attached]) -> Attached:
        """The one object of class `kind` that belongs to this communicator; made when it is first asked for.

        Code that builds on communicators keeps its state of each one here, such as how many messages it has sent on it. The
        object may refer to the communicator, and both are freed together. In a `WeakKeyDictionary` of the module, such an
        object would keep its own key alive, and no communicator would ever be freed.
        """
        found: Attached | None = self._attached.get(kind)
        if found is None:
            found = self._attached[kind] = make(self)
        return found

    @abstractmethod
    def use_device(self, device: torch.device | str) -> Route:
        """Say on which device the tensors of this rank lie from now on, and find out how they then travel. Collective.

        It is asked of all ranks, because what carries a collective must be the same on all of them: where it was not called,
        tensors of a device go through host memory. In collectives all ranks then give tensors of their devices, or all give
        tensors of the CPU. Parts made by `split` later on know it as well.
        """

    @property
    def device(self) -> torch.device | None:
        """On which the tensors of this rank lie, as `use_device` was told; None until then."""
        return None

    @property
    @abstractmethod
    def transport(self) -> Transport:
        """What carries tensors of a device; host memory until `use_device`."""

    @property
    @abstractmethod
    def on_devices(self) -> bool:
        """Whether some rank has said by `use_device` that its tensors lie on another device than the CPU."""

    @abstractmethod
    def describe(self) -> str:
        """Which ranks there are, on what they compute, how their tensors travel and why: sentences for people."""

    @abstractmethod
    def close(self) -> None:
        """Give up what the communicator holds. Later operations raise `ClosedError`."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether `close` was called on this rank."""

    # -- point to point -------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> None:
        """Send to rank `dest`, and return when `tensor` may be written again. Messages of one `tag` keep their order."""
        self.isend(tensor, dest, tag=tag).wait()

    def recv(self, out: torch.Tensor, source: int, *, tag: int = 0) -> None:
        """Fill `out`, of the shape and dtype that rank `source` sends with this `tag`."""
        self.irecv(out, source, tag=tag).wait()

    @abstractmethod
    def isend(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> AbstractRequest:
        """As `send`, without waiting: `tensor` must stay as it is until `wait` of what is returned."""

    @abstractmethod
    def irecv(self, out: torch.Tensor, source: int, *, tag: int = 0) -> AbstractRequest:
        """As `recv`, without waiting: `out` is filled after `wait` of what is returned."""

    @abstractmethod
    def next_tag(self, source: int) -> int:
        """The tag of the oldest message from rank `source` that was not received yet; waits until there is one.

        tag = comm.next_tag(1)
        value = comm.recv_object(1, tag=tag)     # whatever its tag is
        """

    # -- collectives ----------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def bcast(self, tensor: torch.Tensor, *, root: int = 0) -> None:
        """`tensor` of `root` into `tensor` of everyone, in place."""

    @abstractmethod
    def gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, *, root: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        """All ranks' `tensor`, one after the other, into `out` of `root`; `out` is None elsewhere."""

    @abstractmethod
    def scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, *, root: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        """Part `rank` of `root`'s `tensor` into `out` of `rank`; `tensor` is None elsewhere."""

    @abstractmethod
    def allgather(self, tensor: torch.Tensor, out: torch.Tensor, *, counts: Sequence[int] | None = None) -> None:
        """All ranks' `tensor`, one after the other, into all ranks' `out`."""

    @abstractmethod
    def alltoall(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> None:
        """Part j of `tensor` to rank j; what came from rank i becomes part i of `out`."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, *, root: int = 0, op: Op = Op.SUM) -> None:
        """The reduction of all ranks' `tensor` into `tensor` of `root`, in place; other ranks' tensors stay as they are."""

    @abstractmethod
    def iallreduce(self, tensor: torch.Tensor, *, op: Op = Op.SUM) -> AbstractRequest:
        """Begin an all-reduce in place; it is complete when the request is."""

    def allreduce(self, tensor: torch.Tensor, *, op: Op = Op.SUM) -> None:
        """The reduction of all ranks' `tensor` into all ranks' `tensor`, in place; the same bits on every rank."""
        self.iallreduce(tensor, op=op).wait()

    @abstractmethod
    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, *, counts: Sequence[int] | None = None, op: Op = Op.SUM
    ) -> None:
        """Part `rank` of the reduction of all ranks' `tensor` into `out`."""

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

    # -- objects (pickled; only ever between ranks that the user started) -------------------------------------------

    @abstractmethod
    def send_object(self, value: Any, dest: int, *, tag: int = 0) -> None:
        """Send anything that can be pickled to rank `dest`."""

    @abstractmethod
    def recv_object(self, source: int, *, tag: int = 0) -> Any:
        """What rank `source` sent by `send_object` with this `tag`."""

    @abstractmethod
    def bcast_object(self, value: Any, *, root: int = 0) -> Any:
        """`value` of `root`; other ranks' `value` is not looked at."""

    @abstractmethod
    def allgather_object(self, value: Any) -> list[Any]:
        """All ranks' `value`, in the order of the ranks."""

    @abstractmethod
    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """All ranks' `value` on `root`, None elsewhere."""

    def check_peers(self) -> None:  # noqa: B027 - where no death is ever known
        """For waits on memory: costs little, returns at once.

        Raises:
            RankDiedError: where the death of a rank is known.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End all ranks of the job because this one cannot go on. `reason` is printed."""


def parts(total: int, counts: Sequence[int] | None, *, size: int) -> tuple[int, ...]:
    """`counts`, or equal parts of `total` elements."""
    if counts is not None:
        return tuple(counts)
    return (total // size,) * size
