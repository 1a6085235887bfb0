"""Where a process listens for other ranks, and how ranks of the job are told from strangers.

Before anything else moves on a connection both ends prove that they know the key of the meeting, which never moves itself: who
connects says `HMAC(key, "connects", its rank, the other's)`, and who admits it answers `HMAC(key, "admits", ...)`. All that is
read until then has a fixed size, and none of it is a pickle.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from tatami.comm.stall_report import ProcessPlace
from tatami.errors import CommError, InputError, shortened

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ASK_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface."""
TOKEN_BYTES = 16
_RANKS = struct.Struct("<II")
"""Who connects, and to whom."""
PROOF_BYTES = 32
_HELLO_BYTES = _RANKS.size + PROOF_BYTES
_LONGEST_ENTRY_BYTES = 1024
_LOOK_S = 0.02
_MOST_KEPT = 256
"""Connections that do not know the key of this meeting, and may know that of the next one."""

Look = Callable[[Sequence[int]], object]
"""Called every now and then in a wait, with the ranks that have not come yet; ends the wait by raising."""
Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """How other ranks reach a rank.

    Attributes:
        place: of its process.
        door: where it listens.
    """

    place: ProcessPlace
    door: Address


def _proof(key: bytes, side: bytes, ranks: bytes) -> bytes:
    return hmac.digest(key, side + ranks, "sha256")


def hello(key: bytes, rank: int, *, to: int) -> bytes:
    """What `rank` says at the door of the rank `to`."""
    ranks = _RANKS.pack(rank, to)
    return ranks + _proof(key, b"connects", ranks)


def welcome(key: bytes, rank: int, *, to: int) -> bytes:
    """What the rank `to` answers `rank`, which it admits: `PROOF_BYTES`."""
    return _proof(key, b"admits", _RANKS.pack(rank, to))


@final
class Door:
    """A port of this process at which other ranks connect.

    Args:
        stays: for more meetings than one: who does not know the key of this meeting may have come for the next one, and is
            kept. Otherwise it is rejected.
    """

    def __init__(self, *, stays: bool = True) -> None:
        self._stays = stays
        self._listener = socket.create_server((address_of_this_host(), 0), backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self._said: dict[socket.socket, bytes] = {}
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (host, port)

    def admit(self, key: bytes, awaited: Iterable[int], look: Look, *, rank: int) -> dict[int, socket.socket]:
        """The connections of the ranks `awaited`, at the door of `rank`: who connects is one of them if it knows the key.

        One that says nothing keeps none of the others waiting.
        """
        missing, found = set(awaited), dict[int, socket.socket]()
        try:
            self._read(key, missing, found, rank=rank)
            while missing:
                wait([self._listener, *self._unread()], select.POLLIN, partial(look, sorted(missing)))
                with suppress(BlockingIOError, ConnectionError):
                    sock, _ = self._listener.accept()
                    sock.setblocking(False)
                    self._said[sock] = b""
                self._read(key, missing, found, rank=rank)
        except BaseException:
            for sock in found.values():
                sock.close()
            raise
        return found

    def _unread(self) -> list[socket.socket]:
        return [sock for sock, said in self._said.items() if len(said) < _HELLO_BYTES]

    def _read(self, key: bytes, missing: set[int], found: dict[int, socket.socket], *, rank: int) -> None:
        for sock in self._unread():
            try:
                part = sock.recv(_HELLO_BYTES - len(self._said[sock]))
            except BlockingIOError:
                continue
            except ConnectionError:
                part = b""
            self._said[sock] += part
            if not part:
                self._turn_away(sock)
        for sock, said in list(self._said.items()):
            if len(said) == _HELLO_BYTES:
                other, _ = _RANKS.unpack(said[: _RANKS.size])
                if hmac.compare_digest(said, hello(key, other, to=rank)):
                    del self._said[sock]
                    if other in missing:
                        missing.remove(other)
                        found[other] = sock
                        with suppress(ConnectionError):  # it has ended; what is sent to it next says so
                            sock.sendall(welcome(key, other, to=rank))  # the first bytes always fit
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
        """Closes the port, and the connections that were not admitted."""
        for sock in list(self._said):
            self._turn_away(sock)
        self._listener.close()


class AbstractMeeting(ABC):
    """How the ranks of a job find each other."""

    door: Door

    @abstractmethod
    def find(self, look: Look) -> tuple[bytes, tuple[Whereabouts, ...]]:
        """The key of this meeting, and where all ranks are.

        Raises:
            CommError: what another rank should have said is something else.
        """

    @abstractmethod
    def end(self) -> None:
        """All have met, or never will."""


@final
class StoreMeeting(AbstractMeeting):
    """By a store of torch.distributed that all ranks reach, and only this meeting uses.

    Others may reach that store, too. So the key is made of the token of the job and of what all ranks have written there, each
    a random number among it: a process that reads the store and has no token has no key, and one that changes an entry
    only keeps the ranks from meeting.
    """

    def __init__(self, store: Any, *, rank: int, size: int, token: bytes) -> None:
        """Open a door, and tell the others where it is. Not collective.

        Args:
            store: of torch.distributed.
            rank: this one.
            size: how many there are.
            token: of the job, the same on all ranks; empty: every process that reaches the store is trusted.
        """
        self.door = Door(stays=False)
        self._store = store
        self._rank = rank
        self._size = size
        self._token = token
        here = ProcessPlace.here()
        nonce = secrets.token_hex(TOKEN_BYTES)
        self._entry = json.dumps([*self.door.address, here.host, here.kernel, here.pid, nonce]).encode()
        store.set(str(rank), self._entry)

    def find(self, look: Look) -> tuple[bytes, tuple[Whereabouts, ...]]:
        others = [str(rank) for rank in range(self._size) if rank != self._rank]
        while others and not self._store.check(others):
            look([int(rank) for rank in others if not self._store.check([rank])])
            time.sleep(_LOOK_S)
        entries = [self._entry if rank == self._rank else self._store.get(str(rank)) for rank in range(self._size)]
        there = tuple(_whereabouts(entry, rank=rank) for rank, entry in enumerate(entries))
        return hmac.digest(self._token, b"\n".join(entries), "sha256"), there

    def end(self) -> None:
        self.door.close()


def _whereabouts(entry: bytes, *, rank: int) -> Whereabouts:
    """What a `StoreMeeting` of `rank` has written.

    Raises:
        CommError: it is something else.
    """
    try:
        if len(entry) > _LONGEST_ENTRY_BYTES:
            raise ValueError
        host, port, name, kernel, pid, _ = json.loads(entry)
        if [type(each) for each in (host, port, name, kernel, pid)] != [str, int, str, str, int]:
            raise TypeError
    except (ValueError, TypeError, RecursionError):
        wrote = shortened(entry[:_LONGEST_ENTRY_BYTES].decode(errors="replace"))
        raise CommError(
            f"rank {rank} wrote {wrote!r} into the store of the job, which is not an address: does it run another version of "
            "Tatami, or does another program write there?"
        ) from None
    return Whereabouts(place=ProcessPlace(host=name, kernel=kernel, pid=pid), door=(host, port))


@final
@dataclass(frozen=True, kw_only=True)
class KnownMeeting(AbstractMeeting):
    """All ranks have been told of all doors, which stay open for the next meeting.

    Attributes:
        token: of this meeting; random, and known to its ranks alone.
        there: where all ranks are.
    """

    door: Door
    token: bytes
    there: tuple[Whereabouts, ...]

    def find(self, look: Look) -> tuple[bytes, tuple[Whereabouts, ...]]:
        del look
        return self.token, self.there

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
