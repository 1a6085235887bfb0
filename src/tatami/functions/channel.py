"""Messages of a rank with its peers: sent without waiting, taken by their identity in any order, and never waited for for ever.

Between two ranks there is one ordered stream. A receiver takes the next message of the stream, whichever it is, and keeps it
until somebody asks for it; so nobody waits because messages come in another order than they are asked for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Never

import torch

from tatami.clock import Clock, SystemClock
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.checked import MAX_TAG
from tatami.comm.wait import WaitPolicy, wait_until
from tatami.errors import CommError, CommTimeoutError, InputError
from tatami.functions.message import Chunk, Head, Kind, read_head, read_tensors, read_wire, write
from tatami.functions.structure import Packed, unpacked
from tatami.functions.watchdog import Watchdog

TAG = MAX_TAG
"""On the communicator, whose other tags remain the user's; the tags of functions travel inside the messages."""
POLITE = WaitPolicy(spin_s=0.0, first_sleep_s=20e-6, longest_sleep_s=200e-6)
"""For communicators that do not say how to wait: threads must let each other have the interpreter."""
REPORT_AFTER_S = 1.0
"""A wait this long, or of a quarter of the timeout, is reported to all ranks."""
LINGER_S = 1e-3
"""How long a sender helps a large message on its way, and 1 s more for each GB: MPI moves it while both sides are inside."""
MANY_UNSENT = 32

Key = tuple[int, int, int]
"""Kind, tag, number: what a message is asked for by. The tag of a collective or an answer is 0."""

Describe = Callable[[int, float], str]
"""In words: this rank waits for that peer, since so many seconds."""


@dataclass(slots=True, eq=False)
class Message:
    """What came."""

    peer: int
    head: Head
    packed: Packed
    tensors: list[torch.Tensor]


@dataclass(slots=True, eq=False)
class _Unsent:
    """A message under way: its tensors must stay as they are."""

    requests: list[AbstractRequest]
    chunk: Chunk
    tensors: Sequence[torch.Tensor]
    versions: list[int]
    operation: str


class Channel:
    """The messages of one rank on one communicator."""

    def __init__(self, comm: AbstractCommunicator, *, clock: Clock | None = None) -> None:
        self.comm = comm
        self.clock = clock or SystemClock()
        self.policy: WaitPolicy = getattr(_innermost(comm), "policy", POLITE)
        self.watchdog = Watchdog(rank=comm.rank, size=comm.size)
        self.failure: str | None = None
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._num_sent = [0] * comm.size
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._kept: dict[int, dict[Key, deque[Message]]] = defaultdict(lambda: defaultdict(deque))
        self._posted: dict[int, tuple[AbstractRequest, Chunk]] = {}
        self._unsent: deque[_Unsent] = deque()
        self._free: list[Chunk] = []

    def next_number(self, direction: str, peer: int, tag: int) -> int:
        """How many point-to-point messages went before, in this direction (`to` or `from`) with this tag."""
        edge = (direction, peer, tag)
        number = self._numbers.get(edge, 0)
        self._numbers[edge] = number + 1
        return number

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(
        self,
        peer: int,
        *,
        kind: Kind,
        operation: int,
        tag: int,
        chain: int,
        number: int,
        location: bytes,
        content: Packed,
        tensors: Sequence[torch.Tensor],
        name: str = "",
    ) -> int:
        """Send, without waiting for the receiver; returns the serial of the message. `tensors` are contiguous."""
        serial = self._num_sent[peer]
        self._num_sent[peer] = serial + 1
        chunk = self._free.pop() if self._free else Chunk.new()
        follow = write(chunk, Head(kind, operation, tag, chain, number, serial, location), content, tensors)
        requests = [self.comm.isend(chunk.tensor, peer, tag=TAG)]
        unsent = _Unsent(requests, chunk, (), [], name)
        self._unsent.append(unsent)
        if follow:
            requests += [self.comm.isend(each, peer, tag=TAG) for each in follow]
            unsent.tensors = (*tensors, *follow)
            unsent.versions = [tensor._version for tensor in unsent.tensors]
            self._linger(unsent, sum(each.nbytes for each in follow))
        elif len(self._unsent) > MANY_UNSENT:
            self._reap()
        return serial

    def _linger(self, unsent: _Unsent, size_bytes: int) -> None:
        requests = unsent.requests
        wait_until(
            lambda: all(request.test() for request in requests),
            policy=self.policy,
            timeout_s=LINGER_S + size_bytes * 1e-9,
            clock=self.clock,
        )

    def _reap(self) -> None:
        """Forget what has been sent, in order."""
        while self._unsent and all(request.test() for request in self._unsent[0].requests):
            done = self._unsent.popleft()
            self._free.append(done.chunk)
            if done.versions != [tensor._version for tensor in done.tensors]:
                raise InputError(
                    f"{done.operation}: the tensor was changed in place before it had left rank {self.comm.rank}; send a "
                    "clone, or change it after the receiver has answered"
                )

    # -- receiving ----------------------------------------------------------------------------------------------------

    def post(self, peer: int) -> tuple[AbstractRequest, Chunk]:
        """Be ready for the next message of `peer`."""
        posted = self._posted.get(peer)
        if posted is None:
            chunk = self._free.pop() if self._free else Chunk.new()
            posted = self._posted[peer] = (self.comm.irecv(chunk.tensor, peer, tag=TAG), chunk)
        return posted

    def take(self, peer: int, key: Key, describe: Describe) -> Message:
        """The next message of this identity from `peer`.

        Raises:
            CommTimeoutError: it did not come in time; says who waits for whom, and where.
            CommError: this or another rank found out that the ranks disagree.
            RankDiedError: a rank that is needed has ended.
        """
        if self.failure is not None:
            raise CommError(self.failure)
        kept = self._kept[peer]
        if key not in kept and not self._has_come(peer, key):
            self._reap()
            self._wait(peer, key, describe)
        queue = kept[key]
        message = queue.popleft()
        if not queue:
            del kept[key]
        return message

    def _has_come(self, peer: int, key: Key) -> bool:
        kept = self._kept[peer]
        while key not in kept:
            if not self._progress(peer):
                return False
        return True

    def _progress(self, peer: int) -> bool:
        """Take the next message of `peer` in, if there is one."""
        request, chunk = self._posted.get(peer) or self.post(peer)
        if not request.test():
            return False
        del self._posted[peer]
        self._take_in(peer, chunk)
        self._free.append(chunk)
        return True

    def _take_in(self, peer: int, chunk: Chunk) -> None:
        head, wire_bytes, start = read_head(chunk)
        wire = read_wire(chunk, wire_bytes, start)
        if wire is None:
            long = torch.empty(wire_bytes, dtype=torch.uint8)
            self.comm.irecv(long, peer, tag=TAG).wait()
            wire = long.numpy().tobytes()
        else:
            start += wire_bytes
        if head.kind >= Kind.REPORT:
            self._take_in_text(peer, head.kind, wire.decode())
            return
        content = unpacked(wire)
        tensors, follow = read_tensors(chunk, content, start)
        if follow:
            for request in [self.comm.irecv(each, peer, tag=TAG) for each in follow]:
                request.wait()
        if head.kind == Kind.COLLECTIVE:
            problem = self.watchdog.problem_with(peer, head)
            if problem is not None:
                self.fail(problem)
        tag = head.tag if head.kind == Kind.POINT_TO_POINT else 0
        self._kept[peer][head.kind, tag, head.number].append(Message(peer, head, content, tensors))

    def _take_in_text(self, peer: int, kind: int, text: str) -> None:
        if kind == Kind.REPORT:
            self.watchdog.reports[peer] = text
        else:
            self.failure = f"rank {peer} found: {text}"
            raise CommError(self.failure)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, peer: int, key: Key, describe: Describe) -> None:
        timeout_s = self.comm.timeout_s
        start_s = self.clock.now_s()
        first_s = min(REPORT_AFTER_S, timeout_s / 4)
        if self._arrives(peer, key, first_s):
            return
        self._tell_all(Kind.REPORT, describe(peer, self.clock.now_s() - start_s))

        def has_come() -> bool:
            for other in self._peers:
                if other != peer:
                    self._progress(other)
            self._reap()
            return self._has_come(peer, key)

        if wait_until(has_come, policy=self.policy, timeout_s=timeout_s - first_s, clock=self.clock) is not None:
            waited_s = self.clock.now_s() - start_s
            self.fail(self.watchdog.diagnosis(describe(peer, waited_s), waited_s), timeout=True)
        self._tell_all(Kind.REPORT, "")

    def _arrives(self, peer: int, key: Key, timeout_s: float) -> bool:
        """Whether it comes within `timeout_s`; polls nothing but the next message of `peer`, because every poll delays it."""
        end_s = self.clock.now_s() + timeout_s
        while not self._has_come(peer, key):
            request, _ = self.post(peer)
            left_s = end_s - self.clock.now_s()
            if wait_until(request.test, policy=self.policy, timeout_s=left_s, clock=self.clock) is not None:
                return False
        return True

    def fail(self, problem: str, *, timeout: bool = False) -> Never:
        """Tell all ranks, and raise.

        Raises:
            CommError: always; a CommTimeoutError where a wait ended.
        """
        self.failure = problem
        self._tell_all(Kind.FAILURE, problem)
        raise CommTimeoutError(problem) if timeout else CommError(problem)

    def _tell_all(self, kind: Kind, text: str) -> None:
        content = Packed(None, text.encode(), (), (), False, False)
        for peer in self._peers:
            self.send(peer, kind=kind, operation=0, tag=0, chain=0, number=0, location=b"", content=content, tensors=())


def _innermost(comm: AbstractCommunicator) -> AbstractCommunicator:
    inner = getattr(comm, "inner", None)
    return _innermost(inner) if isinstance(inner, AbstractCommunicator) else comm


def channel_of(comm: AbstractCommunicator) -> Channel:
    """The messages of `comm`, made when they are first needed, and kept for as long as `comm` is."""
    state = comm.__dict__
    channel: Channel | None = state.get("_functions_channel")
    if channel is None:
        channel = state["_functions_channel"] = Channel(comm)
    return channel
