"""Messages over one TCP connection between two ranks: matched by communicator and tag, in the order in which they were sent.

Nothing here waits: bytes move as far as the system takes or has them.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import defaultdict, deque
from dataclasses import dataclass, field

from tatami.comm.checked import MAX_TAG
from tatami.comm.thread_world import wrong_size

_HEADER = struct.Struct("<QQQ")
"""Before each message: the communicator, the tag, the bytes."""
LARGEST_BYTES = 1 << 40
"""What a header announces beyond this is no message of Tatami's, and the connection cannot be read any further."""
_FIRST_ROOM_BYTES = 1 << 20
"""Room for a message that is not expected is made as its bytes come, not as its header says."""
Key = tuple[int, int]
"""The communicator and the tag of a message."""


@dataclass(eq=False, kw_only=True)
class Transfer:
    """One side of a message.

    Attributes:
        memory: what is sent, or where it is to lie.
        is_settled: it is complete, or never will be.
        problem: why it never will be.
        is_broken: because the connection is.
    """

    memory: memoryview
    is_settled: bool = False
    problem: str = ""
    is_broken: bool = False


@dataclass(eq=False, kw_only=True)
class _Departing:
    pieces: list[memoryview]
    transfer: Transfer
    has_begun: bool = False


@dataclass(eq=False, kw_only=True)
class _Arriving:
    """A message whose header has come. `transfer` is None where it is not expected yet; `into` is the room there is for it."""

    key: Key
    size_bytes: int
    into: memoryview
    transfer: Transfer | None
    rest: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.rest = self.into

    def is_whole(self) -> bool:
        """Whether all of it has come; makes room for more where it is full."""
        if not self.rest and (come := len(self.into)) < self.size_bytes:
            self.into = memoryview(bytearray(self.into).ljust(min(2 * come, self.size_bytes), b"\0"))
            self.rest = self.into[come:]
        return not self.rest


class TcpConnection:
    """One end of the connection of two ranks. Used by one thread at a time.

    What comes before it is expected is kept, but read only where something else is expected of this rank: until then it stays
    with the sender, and takes no memory here. Room for it grows with what has come, and not with what is announced.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.broken = ""
        self._departing: deque[_Departing] = deque()
        self._expected: defaultdict[Key, deque[Transfer]] = defaultdict(deque)
        self._num_expected = 0
        self._early: defaultdict[Key, deque[tuple[int, memoryview]]] = defaultdict(deque)
        self._num_early = 0
        self._sought: dict[int, Transfer] = {}
        self._header = memoryview(bytearray(_HEADER.size))
        self._header_rest = self._header
        self._arriving: _Arriving | None = None

    @property
    def events(self) -> int:
        """What to poll for."""
        if self.broken:
            return 0
        return (select.POLLIN if self._num_expected or self._sought else 0) | (select.POLLOUT if self._departing else 0)

    def send(self, key: Key, memory: memoryview) -> Transfer:
        transfer = Transfer(memory=memory)
        header = memoryview(_HEADER.pack(*key, len(memory)))
        self._departing.append(_Departing(pieces=[header, memory], transfer=transfer))
        if self.broken:
            self.break_off(self.broken)
        elif len(self._departing) == 1:
            self.push()
        return transfer

    def expect(self, key: Key, memory: memoryview) -> Transfer:
        transfer = Transfer(memory=memory)
        if early := self._early.get(key):
            _fill(transfer, early.popleft()[1])
            if not early:
                del self._early[key]
            return transfer
        self._expected[key].append(transfer)
        self._num_expected += 1
        if self.broken:
            self.break_off(self.broken)
        return transfer

    def seek(self, communicator: int, memory: memoryview) -> Transfer:
        """Settled when a message of this communicator has come that is not expected: its tag, 8 bytes. The message stays."""
        transfer = self._sought[communicator] = Transfer(memory=memory)
        self._find(communicator)
        if self.broken:
            self.break_off(self.broken)
        return transfer

    def _find(self, communicator: int) -> None:
        found = [(early[0][0], tag) for (number, tag), early in self._early.items() if number == communicator and tag < MAX_TAG]
        if found and (transfer := self._sought.pop(communicator, None)) is not None:
            _fill(transfer, memoryview(min(found)[1].to_bytes(8, "little")))

    def withdraw(self, transfer: Transfer) -> None:
        """It is waited for no longer. What has begun to move moves on, as what follows it could not be read otherwise."""
        for each in self._departing:
            if each.transfer is transfer and not each.has_begun:
                self._departing.remove(each)
                return
        self._sought = {number: each for number, each in self._sought.items() if each is not transfer}
        for key, waiting in self._expected.items():
            if transfer in waiting:
                waiting.remove(transfer)
                if not waiting:
                    del self._expected[key]
                self._num_expected -= 1
                return

    def push(self) -> None:
        """Hand to the system what it takes of what departs."""
        while self._departing:
            first = self._departing[0]
            try:
                sent = self.socket.sendmsg(first.pieces)
            except BlockingIOError:
                return
            except OSError as error:
                self.break_off(str(error))
                return
            first.has_begun = True
            while first.pieces and sent >= len(first.pieces[0]):
                sent -= len(first.pieces.pop(0))
            if first.pieces:
                first.pieces[0] = first.pieces[0][sent:]
            else:
                first.transfer.is_settled = True
                self._departing.popleft()

    def pull(self) -> None:
        """Take what has come, as long as something is expected."""
        while self._num_expected or self._sought:
            arriving = self._arriving
            try:
                got = self.socket.recv_into(self._header_rest if arriving is None else arriving.rest)
            except BlockingIOError:
                return
            except OSError as error:
                self.break_off(str(error))
                return
            if got == 0:
                self.break_off("it was closed at the other end")
                return
            if arriving is not None:
                arriving.rest = arriving.rest[got:]
            else:
                self._header_rest = self._header_rest[got:]
                if not self._header_rest:
                    arriving = self._arriving = self._begun()
                    if self.broken:
                        return
            if arriving is not None and arriving.is_whole():
                self._arriving = None
                self._arrived(arriving)

    def break_off(self, reason: str) -> None:
        """Nothing moves here any more."""
        self.broken = reason
        arriving = [] if self._arriving is None or self._arriving.transfer is None else [self._arriving.transfer]
        expected = [each for waiting in self._expected.values() for each in waiting]
        for transfer in (*(each.transfer for each in self._departing), *arriving, *expected, *self._sought.values()):
            transfer.problem, transfer.is_broken, transfer.is_settled = reason, True, True
        self._departing.clear()
        self._expected.clear()
        self._sought.clear()
        self._num_expected, self._arriving = 0, None

    def _begun(self) -> _Arriving | None:
        communicator, tag, size_bytes = _HEADER.unpack(self._header)
        self._header_rest = self._header
        if size_bytes > LARGEST_BYTES:
            self.break_off(f"the other end announced a message of {size_bytes} bytes, which is none of Tatami's")
            return None
        transfer = self._next_expected((communicator, tag))
        fits = transfer is not None and len(transfer.memory) == size_bytes
        room = transfer.memory if transfer is not None and fits else memoryview(bytearray(min(size_bytes, _FIRST_ROOM_BYTES)))
        return _Arriving(key=(communicator, tag), size_bytes=size_bytes, into=room, transfer=transfer)

    def _arrived(self, message: _Arriving) -> None:
        # One that was not expected when it began may be by now.
        transfer = message.transfer or self._next_expected(message.key)
        if transfer is None:
            self._num_early += 1
            self._early[message.key].append((self._num_early, message.into))
            self._find(message.key[0])
            return
        self._num_expected -= 1
        _fill(transfer, message.into)

    def _next_expected(self, key: Key) -> Transfer | None:
        waiting = self._expected.get(key)
        if not waiting:
            return None
        transfer = waiting.popleft()
        if not waiting:
            del self._expected[key]
        return transfer


def _fill(transfer: Transfer, came: memoryview) -> None:
    if len(came) != len(transfer.memory):
        transfer.problem = wrong_size(len(came), len(transfer.memory))
    elif came is not transfer.memory:
        transfer.memory[:] = came
    transfer.is_settled = True
