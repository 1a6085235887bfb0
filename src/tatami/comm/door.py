"""Where a process listens for other ranks, and how ranks that connect are told from strangers."""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from tatami.comm.roll_call import ProcessPlace
from tatami.errors import InputError

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ASK_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface."""
TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
"""What a rank that connects says: the token of the meeting, and who it is."""
_LOOK_S = 0.02
_MOST_KEPT = 256
"""Connections that have not said the token of this meeting, and may say that of the next one."""

Look = Callable[[Sequence[int]], object]
"""Called every now and then in a wait, with the ranks that have not come yet; ends the wait by raising."""
Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Of a rank, as others are told of it.

    Attributes:
        place: of its process.
        door: where it listens.
    """

    place: ProcessPlace
    door: Address


@final
class Door:
    """A port of this process at which other ranks connect.

    Args:
        stays: for more meetings than one: who says another token than that of this meeting may have come for the next one, and
            is kept. Otherwise it is turned away.
    """

    def __init__(self, *, stays: bool = True) -> None:
        self._stays = stays
        self._listener = socket.create_server((address_of_this_host(), 0), backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self._said: dict[socket.socket, bytes] = {}
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (host, port)

    def admit(self, token: bytes, awaited: Iterable[int], look: Look) -> dict[int, socket.socket]:
        """The connections of the ranks `awaited`: who connects is one of them if it knows the token.

        One that says nothing keeps none of the others waiting.
        """
        missing, found = set(awaited), dict[int, socket.socket]()
        try:
            self._read(token, missing, found)
            while missing:
                wait([self._listener, *self._unread()], select.POLLIN, partial(look, sorted(missing)))
                with suppress(BlockingIOError, ConnectionError):
                    sock, _ = self._listener.accept()
                    sock.setblocking(False)
                    self._said[sock] = b""
                self._read(token, missing, found)
        except BaseException:
            for sock in found.values():
                sock.close()
            raise
        return found

    def _unread(self) -> list[socket.socket]:
        return [sock for sock, said in self._said.items() if len(said) < _HELLO.size]

    def _read(self, token: bytes, missing: set[int], found: dict[int, socket.socket]) -> None:
        for sock in self._unread():
            try:
                part = sock.recv(_HELLO.size - len(self._said[sock]))
            except BlockingIOError:
                continue
            except ConnectionError:
                part = b""
            self._said[sock] += part
            if not part:
                self._turn_away(sock)
        for sock, said in list(self._said.items()):
            if len(said) == _HELLO.size:
                theirs, other = _HELLO.unpack(said)
                if secrets.compare_digest(theirs, token):
                    del self._said[sock]
                    if other in missing:
                        missing.remove(other)
                        found[other] = sock
                    else:
                        sock.close()
                elif not self._stays:
                    self._turn_away(sock)
        for sock in list(self._said)[: max(len(self._said) - _MOST_KEPT, 0)]:
            self._turn_away(sock)

    def _turn_away(self, sock: socket.socket) -> None:
        del self._said[sock]
        sock.close()

    def close(self) -> None:
        """Those that wait at it are turned away."""
        for sock in list(self._said):
            self._turn_away(sock)
        self._listener.close()


def hello(token: bytes, rank: int) -> bytes:
    """What `rank` says at another one's door."""
    return _HELLO.pack(token, rank)


class AbstractMeeting(ABC):
    """How the ranks of a job find each other.

    Attributes:
        door: of this rank.
    """

    door: Door

    @abstractmethod
    def find(self, others: Sequence[int], look: Look) -> tuple[bytes, Mapping[int, Address]]:
        """The token of this meeting, and at least the doors of these ranks."""

    @abstractmethod
    def end(self) -> None:
        """All have met, or never will."""


@final
class StoreMeeting(AbstractMeeting):
    """By a store of torch.distributed that all ranks reach, and only this meeting uses."""

    def __init__(self, store: Any, *, rank: int) -> None:
        """Open a door, and tell the others where it is. Not collective."""
        self.door = Door(stays=False)
        self._store = store
        if rank == 0:
            store.set("token", secrets.token_hex(TOKEN_BYTES))
        host, port = self.door.address
        store.set(str(rank), f"{host} {port}")

    def find(self, others: Sequence[int], look: Look) -> tuple[bytes, Mapping[int, Address]]:
        while not self._store.check(["token", *map(str, others)]):
            look([other for other in others if not self._store.check([str(other)])])
            time.sleep(_LOOK_S)
        found = {}
        for other in others:
            host, _, port = self._store.get(str(other)).decode().rpartition(" ")
            found[other] = host, int(port)
        return bytes.fromhex(self._store.get("token").decode()), found

    def end(self) -> None:
        self.door.close()


@final
@dataclass(frozen=True, kw_only=True)
class KnownMeeting(AbstractMeeting):
    """All ranks have been told of all doors, which stay open for the next meeting.

    Attributes:
        token: of this meeting.
        addresses: of the doors of all ranks.
    """

    door: Door
    token: bytes
    addresses: tuple[Address, ...]

    def find(self, others: Sequence[int], look: Look) -> tuple[bytes, Mapping[int, Address]]:
        del look
        return self.token, {other: self.addresses[other] for other in others}

    def end(self) -> None: ...


def wait(sockets: Iterable[socket.socket], events: int, look: Callable[[], object]) -> None:
    """Until one of them is ready."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, events)
    while not poll.poll(_LOOK_S * 1000):
        look()


def address_of_this_host() -> str:
    """Where ranks listen: on the interface that GLOO_SOCKET_IFNAME names, as gloo's do, or at this host's name.

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
