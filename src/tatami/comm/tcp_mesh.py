"""Messages over TCP: a connection for each pair of ranks, on which the threads that wait for messages move them.

gloo's messages do not tell their size, and waiting for one takes a thread: exchanging 184,000 doubles among 8 ranks on 2 cores
took each 19 ms of a core with gloo's, two messages and a thread for each; it takes 2.7 ms here (and 1.6 ms under MPI).
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import final

from tatami.comm.job_token import TOKEN_VARIABLE
from tatami.comm.rendezvous import PROOF_BYTES, AbstractMeeting, Address, Look, Whereabouts, hello, wait, welcome
from tatami.comm.tcp_connection import Key, TcpConnection, Transfer
from tatami.errors import CommError

_THREAD_ENDS_S = 1.0


@final
class TcpMesh:
    """The connections of one rank to all others of its job. Any thread may use it."""

    def __init__(self, meeting: AbstractMeeting, *, rank: int, size: int) -> None:
        """Not collective; `connect` is."""
        self._meeting = meeting
        self._rank = rank
        self._size = size
        self._connections: dict[int, TcpConnection] = {}
        self._turn = threading.Condition()
        self._is_polling = False
        self._pursued: list[Callable[[], bool]] = []
        self._poll = select.poll()
        self._polled: dict[int, tuple[int, TcpConnection]] = {}
        self._wakes, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)

    def connect(self, look: Look) -> tuple[Whereabouts, ...]:
        """Meet all others; where they are. Collective.

        Raises:
            CommError: another rank does not answer, or is not of this job.
        """
        key, there = self._meeting.find(look)
        lower = range(self._rank)
        for other in lower:
            self._connections[other] = TcpConnection(self._reach(other, there[other].door, look))
            with suppress(ConnectionError):  # it closed the connection at once, which `_check_welcome` reports
                self._connections[other].socket.sendall(hello(key, self._rank, to=other))  # the first bytes always fit
        higher = self._meeting.door.admit(key, range(self._rank + 1, self._size), look, rank=self._rank)
        for other, sock in higher.items():
            self._connections[other] = TcpConnection(sock)
        for other in lower:
            self._check_welcome(key, other, place=there[other].door, look=look)
        self._meeting.end()
        return there

    def _check_welcome(self, key: bytes, other: int, *, place: Address, look: Look) -> None:
        """
        Raises:
            CommError: who answers at the door of `other` does not know the key.
        """
        sock, said = self._connections[other].socket, b""
        while len(said) < PROOF_BYTES:
            wait([sock], select.POLLIN, lambda: look([other]))
            try:
                part = sock.recv(PROOF_BYTES - len(said))
            except ConnectionError:
                part = b""
            if not part:
                look([other])
                break
            said += part
        if not hmac.compare_digest(said, welcome(key, self._rank, to=other)):
            how = "is not of this job" if len(said) == PROOF_BYTES else "closed the connection before it proved that it is"
            raise CommError(
                f"rank {self._rank} of {self._size}: who answers for rank {other} at {place[0]}:{place[1]} {how}; has it "
                f"ended, or do the ranks have different tokens ({TOKEN_VARIABLE})?"
            )

    def _reach(self, other: int, place: Address, look: Look) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            with suppress(BlockingIOError):
                sock.connect(place)
            wait([sock], select.POLLOUT, lambda: look([other]))
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                where = f"rank {other} at {place[0]}:{place[1]}"
                raise CommError(f"rank {self._rank} of {self._size} could not reach {where}: {os.strerror(error)}")
        except BaseException:
            sock.close()
            raise
        return sock

    # -- messages -------------------------------------------------------------------------------------------------------

    def send(self, other: int, key: Key, memory: memoryview) -> Transfer:
        """Begin to send; what the system takes at once has left when this returns."""
        return self._begin(lambda: self._connections[other].send(key, memory))

    def expect(self, other: int, key: Key, memory: memoryview) -> Transfer:
        """Begin to receive."""
        return self._begin(lambda: self._connections[other].expect(key, memory))

    def seek(self, other: int, communicator: int, memory: memoryview) -> Transfer:
        """Begin to look for a message with any tag."""
        return self._begin(lambda: self._connections[other].seek(communicator, memory))

    def withdraw(self, other: int, transfer: Transfer) -> None:
        """It is waited for no longer."""
        with self._turn:
            self._connections[other].withdraw(transfer)

    def pursue(self, step: Callable[[], bool]) -> None:
        """From now on call `step` whenever messages have moved, in any wait of this rank, until it says True."""
        with self._turn:
            self._pursued.append(step)

    @property
    def is_busy(self) -> bool:
        """Whether messages are under way, which move only where a thread of this rank looks after them."""
        return any(each.events for each in self._connections.values())

    def progress(self, timeout_s: float, *, is_over: Callable[[], bool]) -> None:
        """Move messages: those that can move now, or those that can first. Returns after `timeout_s` where none can.

        Args:
            is_over: whether what is waited for is settled already; then nothing is done. It is asked while nothing moves:
                another thread may have moved the last of it just now, and nothing else may come for long.
        """
        with self._turn:
            self._take_steps()
            if is_over():
                return
            if self._is_polling:  # another thread's: it moves this one's messages, too
                self._turn.wait(timeout_s)
                return
            self._is_polling = True
            self._register()
        ready: list[tuple[int, int]] = []
        try:
            ready = self._poll.poll(timeout_s * 1000)
        finally:
            with self._turn:
                self._is_polling = False
                for number, events in ready:
                    self._move(number, events)
                self._take_steps()
                self._turn.notify_all()

    def _begin(self, begin: Callable[[], Transfer]) -> Transfer:
        with self._turn:
            transfer = begin()
            if self._is_polling and not transfer.is_settled:
                self._wake()
        return transfer

    def _take_steps(self) -> None:
        if self._pursued:
            self._pursued = [step for step in self._pursued if not step()]

    def _wake(self) -> None:
        with suppress(OSError):
            self._wakes.send(b"\0")

    def _register(self) -> None:
        """Poll for what the connections need now."""
        for connection in self._connections.values():
            number, events = connection.socket.fileno(), connection.events
            before = self._polled.get(number)
            if before is not None and not events:
                self._poll.unregister(number)
                del self._polled[number]
            elif events and (before is None or before[0] != events):
                self._poll.register(number, events)
                self._polled[number] = events, connection

    def _move(self, number: int, events: int) -> None:
        if number == self._woken.fileno():
            with suppress(OSError):
                self._woken.recv(4096)
            return
        connection = self._polled[number][1]
        if events & ~select.POLLOUT:  # a connection that is broken says why where it is read
            connection.pull()
        if events & ~select.POLLIN:
            connection.push()

    # -- the end --------------------------------------------------------------------------------------------------------

    def sever(self) -> None:
        """Break all connections, from any thread: what moves on them ends with an error, here and at the other ends."""
        for connection in list(self._connections.values()):
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        self._wake()

    def close(self) -> None:
        """What has not left yet is lost."""
        if self._is_polling:  # by a thread that was left behind
            self.sever()
        with self._turn:
            self._turn.wait_for(lambda: not self._is_polling, timeout=_THREAD_ENDS_S)
            for connection in self._connections.values():
                connection.break_off("this communicator is closed")
                connection.socket.close()
            self._pursued.clear()
            for sock in (self._wakes, self._woken):
                sock.close()
            self._meeting.end()
