"""The connections of a rank to the members of its group, formed again with every change of them."""

from __future__ import annotations

import threading

from tatami.comm.base import AbstractCommunicator
from tatami.comm.elastic import ElasticCommunicator
from tatami.comm.threads import single_communicator
from tatami.comm.torchdist import TorchdistCommunicator
from tatami.elastic.orders import Assignment
from tatami.elastic.store import reach_store
from tatami.errors import CommError


class Connections:
    """Of one rank.

    Attributes:
        comm: the same object for all groups; None before `begin`.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.comm: ElasticCommunicator | None = None
        self._assignment = assignment
        self._forming: AbstractCommunicator | None = None

    def begin(self) -> ElasticCommunicator:
        """A group of one to begin with: where the first is not formed, the next one is."""
        alone = single_communicator(timeout_s=self._assignment.timeout_s)
        self.comm = ElasticCommunicator(alone, names=(self._assignment.name,))
        return self.comm

    def form(self, group: int, *, members: tuple[str, ...], off: threading.Event) -> None:
        """Form a group, whose members all form it now, and leave the one before. Given up when `off` is set.

        Raises:
            CommError: it was given up, or took too long.
        """
        assert self.comm is not None
        old = self.comm.inner
        try:
            self.comm.regroup(self._formed(group, members=members, off=off), names=members)
        finally:
            self._forming = None
        if isinstance(old, TorchdistCommunicator):
            old.sever()
            old.close()

    def sever(self) -> None:
        """Break all that this rank communicates by, and what it forms. Called by another thread than the others."""
        for comm in (self.comm.inner if self.comm is not None else None, self._forming):
            if isinstance(comm, TorchdistCommunicator):
                comm.sever()

    def _formed(self, group: int, *, members: tuple[str, ...], off: threading.Event) -> AbstractCommunicator:
        name, timeout_s = self._assignment.name, self._assignment.timeout_s
        if len(members) == 1:
            return single_communicator(timeout_s=timeout_s)
        host, port = self._assignment.store
        try:
            store = reach_store(host, port, timeout_s=timeout_s)
        except RuntimeError as error:
            raise CommError(f"{name} does not reach the store of the run at {host}:{port}: {error}") from error
        self._forming = TorchdistCommunicator(
            store, rank=members.index(name), size=len(members), name=f"group/{group}", timeout_s=timeout_s, off=off
        )
        return self._forming
