"""Messages over TCP: a connection for each pair of ranks, on which the threads that wait for messages move them.

gloo has messages too, but none that tell their size, and none that can be waited for without a thread: exchanging 184,000
doubles among 8 ranks on 2 cores took each 19 ms of a core with gloo's, two messages and a thread for each; it takes 2.7 ms here
(and 1.6 ms under MPI).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, final

from tatami.comm.tcp_connection import Key, TcpConnection, Transfer
from tatami.errors import CommError, InputError

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ASK_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface."""
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")
"""What a rank that connects says: the token of this mesh, and who it is."""
_LOOK_S = 0.02
_THREAD_ENDS_S = 1.0


@final
class TcpMesh:
    """The connections of one rank to all others of its job. Any thread may use it."""

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        """Open a port and tell the others where. Not collective; `connect` is.

        Args:
            store: of torch.distributed, that all ranks reach and only this mesh uses.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._connections: dict[int, TcpConnection] = {}
        self._turn = threading.Condition()
        self._is_polling = False
        self._poll = select.poll()
        self._polled: dict[int, tuple[int, TcpConnection]] = {}
        self._wakes, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self._listener = socket.create_server((address_of_this_host(), 0), backlog=size)
        self._listener.setblocking(False)
        if rank == 0:
            store.set("token", secrets.token_hex(_TOKEN_BYTES))
        host, port = self._listener.getsockname()[:2]
        store.set(str(rank), f"{host} {port}")

    def connect(self, look: Callable[[], object]) -> None:
        """Meet all others. Collective.

        Args:
            look: called every now and then; ends the attempt by raising.

        Raises:
            CommError: another rank does not answer.
        """
        token = bytes.fromhex(self._store.get("token").decode())
        for other in range(self._rank):
            host, _, port = self._store.get(str(other)).decode().rpartition(" ")
            self._connections[other] = TcpConnection(self._reach(other, (host, int(port)), look))
            self._connections[other].socket.sendall(_HELLO.pack(token, self._rank))  # the first bytes always fit
        self._admit_others(token, look)
        self._listener.close()

    def _reach(self, other: int, place: tuple[str, int], look: Callable[[], object]) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            with suppress(BlockingIOError):
                sock.connect(place)
            self._await([sock], select.POLLOUT, look)
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                where = f"rank {other} at {place[0]}:{place[1]}"
                raise CommError(f"rank {self._rank} of {self._size} could not reach {where}: {os.strerror(error)}")
        except BaseException:
            sock.close()
            raise
        return sock

    def _admit_others(self, token: bytes, look: Callable[[], object]) -> None:
        """Those of higher ranks: who connects is one of them if it knows the token, and anything else is turned away.

        One that says nothing keeps none of the others waiting.
        """
        said: dict[socket.socket, bytes] = {}
        try:
            while len(self._connections) < self._size - 1:
                self._await([self._listener, *said], select.POLLIN, look)
                with suppress(BlockingIOError, ConnectionError):
                    sock, _ = self._listener.accept()
                    sock.setblocking(False)
                    said[sock] = b""
                for sock in list(said):
                    try:
                        part = sock.recv(_HELLO.size - len(said[sock]))
                    except BlockingIOError:
                        continue
                    except ConnectionError:
                        part = b""
                    said[sock] += part
                    if not part or len(said[sock]) == _HELLO.size:
                        self._admit(sock, said.pop(sock), token)
        finally:
            for sock in said:
                sock.close()

    def _admit(self, sock: socket.socket, said: bytes, token: bytes) -> None:
        theirs, other = _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", -1)
        if secrets.compare_digest(theirs, token) and self._rank < other < self._size and other not in self._connections:
            self._connections[other] = TcpConnection(sock)
        else:
            sock.close()

    def _await(self, sockets: Iterable[socket.socket], events: int, look: Callable[[], object]) -> None:
        """Until one of them is ready."""
        poll = select.poll()
        for sock in sockets:
            poll.register(sock, events)
        while not poll.poll(_LOOK_S * 1000):
            look()

    # -- messages -------------------------------------------------------------------------------------------------------

    def send(self, other: int, key: Key, memory: memoryview) -> Transfer:
        """Begin to send; what the system takes at once has left when this returns."""
        return self._begin(lambda: self._connections[other].send(key, memory))

    def expect(self, other: int, key: Key, memory: memoryview) -> Transfer:
        """Begin to receive."""
        return self._begin(lambda: self._connections[other].expect(key, memory))

    def withdraw(self, other: int, transfer: Transfer) -> None:
        """It is waited for no longer."""
        with self._turn:
            self._connections[other].withdraw(transfer)

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
                self._turn.notify_all()

    def _begin(self, begin: Callable[[], Transfer]) -> Transfer:
        with self._turn:
            transfer = begin()
            if self._is_polling and not transfer.is_settled:
                self._wake()
        return transfer

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
            for sock in (self._listener, self._wakes, self._woken):
                sock.close()


def address_of_this_host() -> str:
    """Where gloo listens, too: on the interface that GLOO_SOCKET_IFNAME names, or at this host's name.

    Raises:
        InputError: there is no such interface, or it has no IPv4 address.
    """
    if named := os.environ.get(INTERFACE_VARIABLE):
        interface = named.split(",")[0]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                answer = fcntl.ioctl(sock.fileno(), _ASK_ADDRESS, struct.pack("256s", interface.encode()[:15]))
            except OSError as error:
                raise InputError(
                    f"{INTERFACE_VARIABLE}={named!r}: no IPv4 address of {interface!r} was found: {error}"
                ) from error
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket() as sock:
            sock.bind((address, 0))
        return address
    return "127.0.0.1"
