"""The communicator of ranks that are threads, and the world that they share.

Every wait is on a `threading.Condition` of the world: a rank that ends, well or not, wakes all others, and those that need it
for what they wait for end at once with `RankDiedError`. Reductions add in the order of the ranks, so that they repeat bit by
bit.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Never

import torch

from tatami.clock import Clock
from tatami.collective import Sync
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.checked import MAX_TAG, as_bytes
from tatami.comm.reduction import Op, combine
from tatami.comm.refusals import Refusals
from tatami.comm.thread_window import ThreadSharedWindow, ThreadWindow
from tatami.comm.wait import Waiting
from tatami.comm.window import AbstractSharedWindow, AbstractWindow, check_window
from tatami.errors import CommError, RankDiedError


@dataclass(kw_only=True, eq=False)
class _Message:
    """One side of a point-to-point transfer, until the other side comes; `number` is in the order of sending."""

    tensor: torch.Tensor
    number: int
    done: bool = False
    problem: str | None = None


@dataclass(kw_only=True)
class _Mailbox:
    """What was sent and not yet received, or is received and not yet sent: one of the two is always empty."""

    sends: deque[_Message] = field(default_factory=deque)
    recvs: deque[_Message] = field(default_factory=deque)


@dataclass(kw_only=True)
class _Meeting:
    """One collective: what each rank brought (copied, so that ranks may go on), and how many have taken their result."""

    call: str
    brought: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    num_left: int = 0


class ThreadWorld:
    """What the threads share; everything is guarded by `changed`."""

    def __init__(self, size: int, clock: Clock) -> None:
        self.size = size
        self.clock = clock
        self.changed = threading.Condition()
        self.ended: dict[int, BaseException | None] = {}
        self.first_failed: int | None = None
        self.mailboxes: dict[tuple[str, int, int, int], _Mailbox] = {}
        self.numbers = count()
        self.meetings: dict[Hashable, _Meeting] = {}
        self.windows: dict[Hashable, dict[int, torch.Tensor]] = {}
        self.refusals = [Refusals(functools.partial(self._send, rank), rank=rank) for rank in range(size)]

    def _send(self, rank: int, message: bytes) -> None:
        with self.changed:
            for other, refusals in enumerate(self.refusals):
                if other != rank:
                    refusals.receive(message)
            self.changed.notify_all()

    def end(self, rank: int, error: BaseException | None) -> None:
        """`rank` (of the world) has ended, with what it raised; wakes everyone."""
        with self.changed:
            self.ended[rank] = error
            if error is not None and self.first_failed is None:
                self.first_failed = rank
            self.changed.notify_all()


class _ThreadRequest(AbstractRequest):
    """A transfer between threads: `ready` says, under the world's lock, whether it is complete; `take` fetches the result."""

    def __init__(
        self,
        communicator: ThreadCommunicator,
        waiting: Waiting,
        *,
        ready: Callable[[], bool],
        needs: Callable[[], tuple[int, ...]],
        take: Callable[[], None],
    ) -> None:
        self._communicator = communicator
        self._waiting = waiting
        self._ready = ready
        self._needs = needs
        self._take = take
        self._complete = False

    def test(self) -> bool:
        world = self._communicator.world
        with world.changed:
            if not self._complete and not self._ready():
                self._communicator.check_alive(self._waiting, self._needs())
                return False
        self._finish()
        return True

    def wait(self) -> None:
        world, timeout_s = self._communicator.world, self._communicator.timeout_s
        with world.changed:
            start_s = world.clock.now_s()
            while not self._complete and not self._ready():
                self._communicator.check_alive(self._waiting, self._needs())
                waited_s = world.clock.now_s() - start_s
                if waited_s >= timeout_s:
                    raise self._timeout(waited_s)
                world.changed.wait(timeout_s - waited_s)
        self._finish()

    def _finish(self) -> None:
        if not self._complete:
            self._complete = True
            self._take()

    def _timeout(self, waited_s: float) -> Exception:
        waiting = self._waiting
        if waiting.peer is None:
            waiting = replace(waiting, missing=self._needs())
        return waiting.timeout(waited_s, members=self._communicator.members)


class ThreadCommunicator(AbstractCommunicator):
    """One rank of a world of threads, or of a part of it made by `split`."""

    def __init__(self, world: ThreadWorld, *, members: tuple[int, ...], rank: int, group: str, timeout_s: float) -> None:
        """`members` are ranks of the world; `rank` is an index into them; `group` is the lineage."""
        super().__init__(rank=rank, hosts=(socket.gethostname(),) * len(members), timeout_s=timeout_s)
        self.world = world
        self.members = members
        self._group = group
        self._num_meetings = 0
        self._num_splits = 0

    @classmethod
    def of_world(cls, world: ThreadWorld, rank: int, *, timeout_s: float) -> ThreadCommunicator:
        return cls(world, members=tuple(range(world.size)), rank=rank, group="", timeout_s=timeout_s)

    def split(self, color: int | None, *, key: int = 0) -> ThreadCommunicator | None:
        self._check_open("split")
        self._num_splits += 1
        ranks = self._split_ranks(color, key)
        if ranks is None:
            return None
        part = ThreadCommunicator(
            self.world,
            members=tuple(self.members[rank] for rank in ranks),
            rank=ranks.index(self.rank),
            group=f"{self._group}/{self._num_splits}.{color}",
            timeout_s=self.timeout_s,
        )
        self._inherit(part, ranks)
        return part

    def close(self) -> None:
        self._closed = True

    @property
    def refusals(self) -> Refusals:
        return self.world.refusals[self.members[self.rank]]

    @property
    def lineage(self) -> str:
        return self._group

    @property
    def library(self) -> str:
        return f"threads, torch {torch.__version__}"

    @property
    def has_windows(self) -> bool:
        return True

    def window(
        self, size: int, dtype: torch.dtype, *, sync: Sync = Sync.PSCW, memory: torch.Tensor | None = None
    ) -> AbstractWindow:
        check_window(size, sync)
        own = self.duplicate()
        tensors = own._exchange_tensors(torch.zeros(size, dtype=dtype, device="cpu") if memory is None else memory)
        return ThreadWindow(own, tensors, sync=sync, lock=self.world.changed)

    def shared_window(self, size: int, dtype: torch.dtype) -> AbstractSharedWindow:
        check_window(size, Sync.PSCW)
        own = self.duplicate()
        return ThreadSharedWindow(own, own._exchange_tensors(torch.zeros(size, dtype=dtype, device="cpu")))

    def _exchange_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' `tensor`, itself, in the order of the ranks. Collective."""
        with self.world.changed:
            exchange = self.world.windows.setdefault((self._group, self._num_meetings), {})
            exchange[self.rank] = tensor
        key = (self._group, self._num_meetings)
        self.barrier()
        tensors = [exchange[rank] for rank in range(self.size)]
        self.world.windows.pop(key, None)
        return tensors

    def abort(self, reason: str) -> Never:
        """Raises `RankDiedError` here, and in all other ranks as soon as they wait."""
        raise RankDiedError(f"rank {self.rank} of {self.size} aborted: {reason}", rank=self.rank)

    def check_peers(self) -> None:
        with self.world.changed:
            self.check_alive(Waiting(operation="wait", rank=self.rank, size=self.size), ())

    def check_alive(self, waiting: Waiting, needs: Sequence[int]) -> None:
        """Raise where one of the ranks that are needed has ended, or any rank has failed. Called under the world's lock."""
        needed = [self.members[rank] for rank in needs] or self.members
        self.refusals.check(self._group, needed, now_s=0.0)
        world = self.world
        died = world.first_failed
        if died is None:
            died = next((self.members[rank] for rank in needs if self.members[rank] in world.ended), None)
        if died is None:
            return
        rank = self.members.index(died) if died in self.members else died
        of_world = "" if len(self.members) == world.size else f" (rank {died} of the world)"
        error = world.ended[died]
        how = "ended without taking part" if error is None else f"died: {type(error).__name__}: {error}"
        raise RankDiedError(f"{waiting.describe()}: rank {rank}{of_world} {how}", rank=rank)

    # -- point to point -----------------------------------------------------------------------------------------------

    def _start_send(self, tensor: torch.Tensor, dest: int, tag: int) -> AbstractRequest:
        message = _Message(tensor=tensor, number=next(self.world.numbers))
        with self.world.changed:
            box = self._mailbox(source=self.rank, dest=dest, tag=tag)
            box.sends.append(message)
            self.world.changed.notify_all()  # a rank that waits for the next message, whatever its tag, has no receive here
            self._match(box)
        return self._message_request("send", message, peer=dest, tag=tag)

    def _start_recv(self, out: torch.Tensor, source: int, tag: int) -> AbstractRequest:
        message = _Message(tensor=out, number=0)
        with self.world.changed:
            box = self._mailbox(source=source, dest=self.rank, tag=tag)
            box.recvs.append(message)
            self._match(box)
        return self._message_request("recv", message, peer=source, tag=tag)

    def _await_tag(self, source: int) -> int:
        found: list[tuple[int, int]] = []

        def ready() -> bool:
            for (group, sender, dest, tag), box in self.world.mailboxes.items():
                if (group, sender, dest) == (self._group, source, self.rank) and tag < MAX_TAG and box.sends:
                    found.append((box.sends[0].number, tag))
            return bool(found)

        waiting = Waiting(operation="next_tag", rank=self.rank, size=self.size, peer=source)
        _ThreadRequest(self, waiting, ready=ready, needs=lambda: (source,), take=lambda: None).wait()
        return min(found)[1]

    def _mailbox(self, *, source: int, dest: int, tag: int) -> _Mailbox:
        return self.world.mailboxes.setdefault((self._group, source, dest, tag), _Mailbox())

    def _match(self, box: _Mailbox) -> None:
        """The rank that comes second moves the data."""
        if not (box.sends and box.recvs):
            return
        send, recv = box.sends.popleft(), box.recvs.popleft()
        sent_bytes, room_bytes = send.tensor.nbytes, recv.tensor.nbytes
        if sent_bytes == room_bytes:
            as_bytes(recv.tensor).copy_(as_bytes(send.tensor))
        else:
            recv.problem = wrong_size(sent_bytes, room_bytes)
        send.done = recv.done = True
        self.world.changed.notify_all()

    def _message_request(self, operation: str, message: _Message, *, peer: int, tag: int) -> AbstractRequest:
        waiting = Waiting(operation=operation, rank=self.rank, size=self.size, peer=peer, tag=tag)

        def take() -> None:
            if message.problem is not None:
                raise CommError(f"{waiting.describe()}: {message.problem}")

        return _ThreadRequest(self, waiting, ready=lambda: message.done, needs=lambda: (peer,), take=take)

    # -- collectives: everyone brings a copy, and takes its own result from all copies -----------------------------------

    def _meet(
        self,
        operation: str,
        tensor: torch.Tensor | None,
        pick: Callable[[list[Any], list[tuple[int, ...]]], Iterable[_Result]],
        *,
        counts: tuple[int, ...] = (),
        root: int | None = None,
    ) -> AbstractRequest:
        """`pick` returns the results of this rank, from what all ranks gave as `tensor` and as `counts`."""
        world = self.world
        self._num_meetings += 1
        key = (self._group, self._num_meetings)
        call = operation if root is None else f"{operation} with root {root}"
        copied = None if tensor is None else tensor.flatten().clone()
        with world.changed:
            meeting = world.meetings.setdefault(key, _Meeting(call=call))
            if meeting.call != call:
                raise CommError(
                    f"rank {self.rank} of {self.size} calls {call} where another rank calls {meeting.call}; "
                    "all ranks must call the same collectives in the same order"
                )
            meeting.brought[self.rank] = (copied, counts)
            if len(meeting.brought) == self.size:
                world.changed.notify_all()

        def finish() -> None:
            given, sizes = zip(*(meeting.brought[rank] for rank in range(self.size)), strict=True)
            for room, part, source in pick(list(given), list(sizes)):
                if room.nbytes != part.nbytes:
                    problem = wrong_size(part.nbytes, room.nbytes)
                    raise CommError(f"{operation} on rank {self.rank} of {self.size}: from rank {source}: {problem}")
                as_bytes(room).copy_(as_bytes(part))
            with world.changed:
                meeting.num_left += 1
                if meeting.num_left == self.size:
                    del world.meetings[key]

        return _ThreadRequest(
            self,
            Waiting(operation=operation, rank=self.rank, size=self.size),
            ready=lambda: len(meeting.brought) == self.size,
            needs=lambda: tuple(rank for rank in range(self.size) if rank not in meeting.brought),
            take=finish,
        )

    def _start_barrier(self) -> AbstractRequest:
        return self._meet("barrier", None, lambda *_: ())

    def _start_bcast(self, tensor: torch.Tensor, root: int) -> AbstractRequest:
        if self.rank == root:
            return self._meet("bcast", tensor, lambda *_: (), root=root)
        return self._meet("bcast", None, lambda given, _: [(tensor, given[root], root)], root=root)

    def _start_gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        return self._meet("gather", tensor, lambda given, _: () if out is None else _parts(out, counts, given), root=root)

    def _start_scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        def pick(given: list[Any], sizes: list[tuple[int, ...]]) -> list[_Result]:
            return [(out, torch.split(given[root], list(sizes[root]))[self.rank], root)]

        return self._meet("scatter", tensor, pick, counts=counts, root=root)

    def _start_allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...]) -> AbstractRequest:
        return self._meet("allgather", tensor, lambda given, _: _parts(out, counts, given))

    def _start_alltoall(
        self, tensor: torch.Tensor, out: torch.Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...]
    ) -> AbstractRequest:
        def pick(given: list[Any], sizes: list[tuple[int, ...]]) -> Iterable[_Result]:
            mine = [torch.split(whole, list(each))[self.rank] for whole, each in zip(given, sizes, strict=True)]
            return _parts(out, recv_counts, mine)

        return self._meet("alltoall", tensor, pick, counts=send_counts)

    def _start_reduce(self, tensor: torch.Tensor, root: int, op: Op) -> AbstractRequest:
        def pick(given: list[Any], _: object) -> Iterable[_Result]:
            return [(tensor, _reduced(given, op), root)] if self.rank == root else ()

        return self._meet("reduce", tensor, pick, root=root)

    def _start_allreduce(self, tensor: torch.Tensor, op: Op) -> AbstractRequest:
        return self._meet("allreduce", tensor, lambda given, _: [(tensor, _reduced(given, op), 0)])

    def _start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...], op: Op
    ) -> AbstractRequest:
        start = sum(counts[: self.rank])
        mine = slice(start, start + counts[self.rank])
        return self._meet(
            "reduce_scatter", tensor, lambda given, _: [(out, _reduced([part[mine] for part in given], op), self.rank)]
        )


_Result = tuple[torch.Tensor, torch.Tensor, int]
"""Where it goes, its values, and the rank that they are from."""


def _parts(out: torch.Tensor, counts: tuple[int, ...], given: list[torch.Tensor]) -> Iterable[_Result]:
    """What each rank has given, for its part of `out`."""
    return zip(torch.split(out.view(-1), list(counts)), given, range(len(given)), strict=True)


def wrong_size(sent_bytes: int, room_bytes: int) -> str:
    """What to say of a message that does not fit."""
    return f"{sent_bytes} bytes came where {room_bytes} were expected; shapes and dtypes must agree on both sides"


def _reduced(given: list[torch.Tensor], op: Op) -> torch.Tensor:
    """In the order of the ranks, so that every rank computes the same bits."""
    if any(part.shape != given[0].shape for part in given):
        raise CommError(f"ranks reduce tensors of different sizes: {[part.numel() for part in given]} elements")
    result = given[0].clone()
    for part in given[1:]:
        combine(result, part, op)
    return result
