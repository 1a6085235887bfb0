"""Messages of a rank with its peers: sent without waiting, taken by their identity in any order, and each wait has an end.

Between two ranks there is one ordered stream. A receiver takes the next message of the stream, whichever it is, and keeps it
until it is asked for; so messages may come in another order than they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Never

import torch

from tatami.clock import Clock, SystemClock
from tatami.comm.base import AbstractCommunicator
from tatami.comm.checked import as_bytes
from tatami.comm.stall_report import format_ranks
from tatami.comm.wait import WaitPolicy, wait_until
from tatami.errors import CommError, CommTimeoutError, RankDiedError
from tatami.functions.chain import chains_of
from tatami.functions.inbox import Inbox, Key, ReceivedMessage
from tatami.functions.memory import Memory
from tatami.functions.message import (
    REPORT,
    Label,
    MessageKind,
    following,
    read_head,
    read_label,
    read_tensors,
    read_text,
    read_wire,
    text_label,
    write,
)
from tatami.functions.outbox import Outbox, Unsent
from tatami.functions.peer_reports import PeerReports
from tatami.functions.wire import TAG, Chunk, Test, wait_closely, wire_of

POLITE = WaitPolicy(spin_s=0.0, first_sleep_s=20e-6, longest_sleep_s=200e-6)
"""For communicators that do not say how to wait: threads must let each other have the interpreter."""
REPORT_AFTER_S = 1.0
"""A wait this long, or of a quarter of the timeout, is reported to all ranks."""

Describe = Callable[[int, float], str]
"""In words: this rank waits for that peer, since so many seconds."""


class Channel:
    """The messages of one rank on one communicator."""

    def __init__(self, comm: AbstractCommunicator, *, clock: Clock | None = None) -> None:
        self.comm = comm
        self.clock = clock or SystemClock()
        self.policy: WaitPolicy = getattr(_innermost(comm), "policy", POLITE)
        self.peer_reports = PeerReports(rank=comm.rank, size=comm.size)
        self.failure: str | None = None
        self.memory = Memory()
        self.chains = chains_of(comm)
        self._wire = wire_of(comm)
        self.chunk_bytes = self._wire.chunk_bytes
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._num_sent = [0] * comm.size
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._inbox = Inbox(rank=comm.rank, size=comm.size)
        self._kept = self._inbox.by_peer
        self._posted: dict[int, tuple[Test, Chunk]] = {}
        self._free: list[Chunk] = []
        self._outbox = Outbox(self._free, rank=comm.rank, policy=self.policy, clock=self.clock)

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
        kind: int,
        operation: int,
        tag: int,
        chain: int,
        number: int,
        label: Label,
        tensors: Sequence[torch.Tensor],
        name: str = "",
    ) -> int:
        """Send, without waiting for the receiver; returns the serial of the message. `tensors` are contiguous.

        Raises:
            CommTimeoutError: as many are under way as may be, and none of them was received in time.
        """
        if self._outbox.is_full and kind < REPORT:
            self._wait_for_room(peer, name)
        serial = self._num_sent[peer]
        self._num_sent[peer] = serial + 1
        chunk = self._free.pop() if self._free else self._wire.new_chunk()
        write(chunk, (kind, operation, tag, chain, number, serial), label, tensors)
        test = self._wire.send(chunk, peer, label.used_bytes)
        if label.all_fit:
            self._outbox.add(Unsent([test], chunk, (), [], name, is_report=kind >= REPORT))
        else:
            follow = following(label, tensors)
            tests = [test, *(self._wire.send_memory(each, peer) for each in follow)]
            kept = (*tensors, *follow)
            unsent = Unsent(tests, chunk, kept, [tensor._version for tensor in kept], name)
            self._outbox.add_large(unsent, size_bytes=sum(each.nbytes for each in follow))
        return serial

    def _wait_for_room(self, peer: int, name: str) -> None:
        def has_room() -> bool:
            self._outbox.clear()
            if not self._outbox.is_full:
                return True
            # The peers may wait for room as well, or have reported a failure.
            for other in self._peers:
                if not self._inbox.is_full:
                    self._progress(other)
            return False

        waited_s = wait_until(has_room, policy=self.policy, timeout_s=self.comm.timeout_s, clock=self.clock)
        if waited_s is not None:
            self.fail(
                f"{name} on rank {self.comm.rank} to rank {peer}: {self._outbox.num_unsent} messages of this rank are under "
                f"way, and the oldest was not received for {waited_s:.3g} s; no more are sent. Is every send received?",
                timeout=True,
            )

    # -- receiving ----------------------------------------------------------------------------------------------------

    def post(self, peer: int) -> tuple[Test, Chunk]:
        """Be ready for the next message of `peer`."""
        posted = self._posted.get(peer)
        if posted is None:
            chunk = self._free.pop() if self._free else self._wire.new_chunk()
            posted = self._posted[peer] = (self._wire.recv(chunk, peer), chunk)
        return posted

    def take(self, peer: int, key: Key, describe: Describe) -> ReceivedMessage:
        """The next message of this identity from `peer`.

        Raises:
            CommTimeoutError: it did not come in time; says who waits for whom, and where.
            CommError: this or another rank found out that the ranks disagree.
            RankDiedError: a rank that is needed has ended.
        """
        if self.failure is not None:
            raise CommError(self.failure)
        try:
            return self._come(peer, key) or self._wait(peer, key, describe)
        except self._wire.errors as error:
            raise CommError(f"{describe(peer, 0.0)}: the message was lost: {error}") from error

    def _come(self, peer: int, key: Key) -> ReceivedMessage | None:
        """The message, if it has come."""
        kept = self._kept[peer]
        while not kept or key not in kept:
            test, chunk = self._posted.get(peer) or self.post(peer)
            if not test():
                return None
            message = self._take_in(peer, chunk)
            if message is not None:
                if message.key == key:
                    return message
                self._keep(message)
        return self._inbox.pop(peer, key)

    def refuse_unasked(self) -> None:
        """
        Raises:
            CommError: a gradient has come for a pass that this rank does not run backward through any more.
        """
        for peer in self._peers:
            answers = [number for kind, _, number in self._kept[peer] if kind == MessageKind.ANSWER]
            going = (*self.chains.in_flight.values(), *self.chains.retained) if answers else ()
            first = min((chain.first_serials[peer] for chain in going if peer in chain.first_serials), default=math.inf)
            if any(number < first for number in answers):
                self.fail(
                    f"rank {peer} ran backward through a pass more often than rank {self.comm.rank}, where its gradient would "
                    "be lost. Run backward equally often on all ranks: a rank without a loss calls "
                    "tatami.functions.backward(), each time with the same retain_graph"
                )

    def _keep(self, message: ReceivedMessage) -> None:
        problem = self._inbox.put(message)
        if problem is not None:
            self.fail(problem)

    def _take_in(self, peer: int, chunk: Chunk) -> ReceivedMessage | None:
        """What lies in the `chunk` that was posted, with what follows it; None where it was a report."""
        del self._posted[peer]
        head = read_head(chunk)
        wire = read_wire(chunk, head.label_bytes)
        if wire is None:
            long = torch.empty(head.label_bytes, dtype=torch.uint8, device="cpu")
            self.comm.irecv(long, peer, tag=TAG).wait()
            wire = long.numpy().tobytes()
        if head.kind >= REPORT:
            self._free.append(chunk)
            self._take_in_text(peer, head.kind, read_text(wire))
            return None
        label = read_label(wire, chunk.size_bytes)
        tensors = read_tensors(chunk, label, self.memory)
        self._free.append(chunk)
        if not label.all_fit:
            self._take_in_following(peer, [t for t, place in zip(tensors, label.places, strict=True) if place < 0])
        if head.kind == MessageKind.COLLECTIVE:
            problem = self.peer_reports.problem_with(peer, head, their_location=label.location)
            if problem is not None:
                self.fail(problem)
        return ReceivedMessage(peer, head, label, tensors)

    def _take_in_following(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        for request in [self.comm.irecv(as_bytes(each), peer, tag=TAG) for each in tensors]:
            wait_closely(request.test, policy=self.policy, timeout_s=self.policy.spin_s, clock=self.clock)
            request.wait()

    def _take_in_text(self, peer: int, kind: int, text: str) -> None:
        if kind == REPORT:
            self.peer_reports.reports[peer] = text
        else:
            self.failure = f"rank {peer} found: {text}"
            raise CommError(self.failure)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, peer: int, key: Key, describe: Describe) -> ReceivedMessage:
        self._outbox.clear()
        timeout_s = self.comm.timeout_s
        start_s = self.clock.now_s()
        first_s = min(REPORT_AFTER_S, timeout_s / 4)
        message = self._arrives(peer, key, start_s + first_s)
        if message is not None:
            return message
        self._tell_all(MessageKind.REPORT, describe(peer, self.clock.now_s() - start_s))
        came: list[ReceivedMessage] = []
        ended: set[int] = set()

        def has_come() -> bool:
            for other in self._peers:
                if other != peer and other not in ended:
                    # One that has done its part may end before this wait does. Where it died, `peer` does not come either.
                    try:
                        self._progress(other)
                    except RankDiedError:
                        ended.add(other)
            self._outbox.clear()
            message = self._come(peer, key)
            if message is not None:
                came.append(message)
            return message is not None

        if wait_until(has_come, policy=self.policy, timeout_s=timeout_s - first_s, clock=self.clock) is not None:
            waited_s = self.clock.now_s() - start_s
            gone = f" By then {format_ranks(sorted(ended))} had ended." if ended else ""
            self.fail(self.peer_reports.diagnosis(describe(peer, waited_s), waited_s) + gone, timeout=True)
        self._tell_all(MessageKind.REPORT, "")
        return came[0]

    def _arrives(self, peer: int, key: Key, end_s: float) -> ReceivedMessage | None:
        """The message, if it comes until `end_s`; polls the next message of `peer` alone, because every poll delays it."""
        while True:
            test, _ = self.post(peer)
            if not wait_closely(test, policy=self.policy, timeout_s=end_s - self.clock.now_s(), clock=self.clock):
                return None
            message = self._come_tested(peer, key)
            if message is not None:
                return message

    def _come_tested(self, peer: int, key: Key) -> ReceivedMessage | None:
        """As `_come`, where the next message has been seen to be there."""
        message = self._take_in(peer, self._posted[peer][1])
        if message is None or message.key == key:
            return message
        self._keep(message)
        return self._come(peer, key)

    def _progress(self, peer: int) -> None:
        """Take the next message of `peer` in, if there is one."""
        test, chunk = self.post(peer)
        if test():
            message = self._take_in(peer, chunk)
            if message is not None:
                self._keep(message)

    def fail(self, problem: str, *, timeout: bool = False) -> Never:
        """Tell all ranks, and raise.

        Raises:
            CommError: always; a CommTimeoutError where a wait ended.
        """
        self.failure = problem
        self._tell_all(MessageKind.FAILURE, problem)
        raise CommTimeoutError(problem) if timeout else CommError(problem)

    def _tell_all(self, kind: MessageKind, text: str) -> None:
        label = text_label(text, self.chunk_bytes)
        for peer in self._peers:
            self.send(peer, kind=kind, operation=0, tag=0, chain=0, number=0, label=label, tensors=())


def _innermost(comm: AbstractCommunicator) -> AbstractCommunicator:
    inner = getattr(comm, "inner", None)
    return _innermost(inner) if isinstance(inner, AbstractCommunicator) else comm


def channel_of(comm: AbstractCommunicator) -> Channel:
    """The messages of `comm`, made when they are first needed, and kept for as long as `comm` is."""
    return comm.attached(Channel, Channel)
