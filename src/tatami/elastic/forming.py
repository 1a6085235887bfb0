"""The connections of a rank to the members of its group, formed again with every change of them, and the store that helps.

The store is kept by the process that started the run, which does not die with a rank.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from tatami.comm.base import AbstractCommunicator
from tatami.comm.elastic import ElasticCommunicator
from tatami.comm.rendezvous import Door, KnownMeeting, Whereabouts
from tatami.comm.stall_report import ProcessPlace
from tatami.comm.tcp import TcpCommunicator
from tatami.comm.threads import single_communicator
from tatami.elastic.orders import Assignment
from tatami.errors import CommError


class Connections:
    """The connections of one rank.

    In the order to form a group the run says where its members are, so that they connect at once, over doors that stay open; to
    find each other in the store took six messages and as many waits. The store is left for the groups of before the loop, and
    for questions in waits that are too long.

    Attributes:
        comm: the same object for all groups; None before `begin`.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.comm: ElasticCommunicator | None = None
        self._assignment = assignment
        self._forming: AbstractCommunicator | None = None
        self._door: Door | None = None
        self._store: Any = None

    def begin(self) -> ElasticCommunicator:
        """A group of one to begin with: where the first is not formed, the next one is."""
        alone = single_communicator(timeout_s=self._assignment.timeout_s)
        self.comm = ElasticCommunicator(alone, names=(self._assignment.name,))
        return self.comm

    @property
    def whereabouts(self) -> Whereabouts:
        """Where this rank can be reached; from now on it is ready to form a group."""
        self._reached()
        self._door = self._door or Door()
        return Whereabouts(place=ProcessPlace.here(), door=self._door.address)

    def form(
        self,
        group: int,
        *,
        members: tuple[str, ...],
        off: threading.Event,
        there: Sequence[Whereabouts] = (),
        token: bytes = b"",
    ) -> None:
        """Form a group, whose members all form it now, and leave the one before. Given up when `off` is set.

        Args:
            group: its number.
            members: their names, in the order of the ranks.
            there: where they are, in the same order, where the run knows it; otherwise they find each other in the store.
            token: by which they know each other then.

        Raises:
            CommError: it was given up, or took too long.
        """
        assert self.comm is not None
        old = self.comm.inner
        try:
            self.comm.regroup(self._formed(group, members=members, off=off, there=there, token=token), names=members)
        finally:
            self._forming = None
        if isinstance(old, TcpCommunicator):
            old.sever()
            old.close()

    def sever(self) -> None:
        """Break all that this rank communicates by, and what it forms. Called by another thread than the others."""
        for comm in (self.comm.inner if self.comm is not None else None, self._forming):
            if isinstance(comm, TcpCommunicator):
                comm.sever()

    def close(self) -> None:
        """The run is over for this rank."""
        if self.comm is not None:
            self.comm.close()
        if self._door is not None:
            self._door.close()

    def _formed(
        self, group: int, *, members: tuple[str, ...], off: threading.Event, there: Sequence[Whereabouts], token: bytes
    ) -> AbstractCommunicator:
        timeout_s = self._assignment.timeout_s
        if len(members) == 1:
            return single_communicator(timeout_s=timeout_s)
        self._forming = TcpCommunicator(
            self._reached(),
            rank=members.index(self._assignment.name),
            size=len(members),
            name=f"group/{group}",
            timeout_s=timeout_s,
            off=off,
            token=self._assignment.token,
            meeting=KnownMeeting(door=self._door, token=token, there=tuple(there)) if self._door and there else None,
        )
        return self._forming

    def _reached(self) -> Any:
        """The store: nothing here waits in it, so that one connection is enough."""
        if self._store is None:
            host, port = self._assignment.store
            try:
                patience = timedelta(seconds=self._assignment.timeout_s)
                # A connection of its own: an operation that waits keeps all others of its connection waiting.
                self._store = cast(Any, dist).TCPStore(host, port, is_master=False, timeout=patience)
            except RuntimeError as error:
                name = self._assignment.name
                raise CommError(f"{name} does not reach the store of the run at {host}:{port}: {error}") from error
        return self._store


def keep_store(host: str, *, timeout_s: float) -> Any:
    """Keep a store at a free port of this address; by itself it would listen on all interfaces."""
    make = cast(Any, dist).TCPStore
    listener = socket.create_server((host, 0))
    port, number = listener.getsockname()[1], listener.detach()
    limit = timedelta(seconds=timeout_s)
    return make(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=number)
