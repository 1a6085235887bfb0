"""Waits of ranks of torch.distributed: for the works of a collective, and for messages; each ends, and says for whom it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Never

import torch

from tatami.clock import SystemClock
from tatami.comm.base import AbstractRequest
from tatami.comm.checked import CheckedCommunicator, as_bytes
from tatami.comm.roll_call import AbstractRollCall
from tatami.comm.staging import is_on_host
from tatami.comm.tcp_connection import Transfer
from tatami.comm.tcp_mesh import TcpMesh
from tatami.comm.wait import Waiting, WaitPolicy, wait_until
from tatami.errors import CommError, RankDiedError

_SHORTEST_S = 1e-3
"""A shorter wait of gloo's would be one without an end."""
_SLICE_S = 0.25
"""So long a wait goes on before it is looked whether another rank asks what this one does."""

abandoned: list[tuple[Any, Any, tuple[torch.Tensor, ...]]] = []
"""Collectives whose wait timed out, with their group and tensors: gloo may still write there."""


class AbstractTorchdistWaits(CheckedCommunicator):
    """How a rank waits.

    Attributes:
        policy: how its polls are spaced.
        world_ranks: of all ranks, in the communicator that this one is a part of: those of the mesh.
    """

    policy: WaitPolicy
    world_ranks: tuple[int, ...]
    _mesh: TcpMesh
    _number: int

    def __init__(
        self,
        *,
        rank: int,
        hosts: tuple[str, ...],
        name: str,
        timeout_s: float,
        roll_call: AbstractRollCall | None,
        off: threading.Event | None,
    ) -> None:
        super().__init__(rank=rank, hosts=hosts, timeout_s=timeout_s)
        self.clock = SystemClock()
        self._name = name
        self._roll_call = roll_call
        self._off = off
        self._severed = False

    @property
    def roll_call(self) -> AbstractRollCall | None:
        return self._roll_call

    def left_s(self, start_s: float) -> float:
        """What is left of the timeout of a wait that began then."""
        return self.timeout_s - (self.clock.now_s() - start_s)

    def answer(self, waiting: Waiting) -> None:
        """In a long wait: answer those who ask."""
        if self._roll_call is not None:
            self._roll_call.answer(waiting.describe())

    def check_off(self) -> None:
        """
        Raises:
            CommError: this communicator was called off.
        """
        if self._severed or (self._off is not None and self._off.is_set()):
            raise CommError(f"{self._name} was called off on rank {self.rank} of {self.size}: its members change")

    @property
    def mesh(self) -> TcpMesh:
        """On which messages move; one for all parts of a communicator."""
        return self._mesh

    def _sending(self, tensor: torch.Tensor, dest: int, tag: int) -> tuple[int, Transfer]:
        return dest, self._mesh.send(self.world_ranks[dest], (self._number, tag), _memory(tensor))

    def _receiving(self, out: torch.Tensor, source: int, tag: int) -> tuple[int, Transfer]:
        return source, self._mesh.expect(self.world_ranks[source], (self._number, tag), _memory(out))


class WorkRequest(AbstractRequest):
    """Works of one collective, complete together."""

    def __init__(
        self, communicator: AbstractTorchdistWaits, works: list[Any], group: Any, operation: str, *keep: torch.Tensor
    ) -> None:
        self._communicator = communicator
        self._works = works
        self._group = group
        self._waiting = Waiting(operation=operation, rank=communicator.rank, size=communicator.size)
        self._keep = keep

    def test(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            if self._communicator.mesh.is_busy:  # with messages that others may wait for before they join in
                self._communicator.mesh.progress(0.0, is_over=lambda: False)
            return False
        self._finish()
        return True

    def wait(self) -> None:
        communicator = self._communicator
        start_s = communicator.clock.now_s()
        if is_on_host(self._keep[0]) and not communicator.mesh.is_busy:
            # Gloo's own wait sleeps, and gives the core to gloo's threads.
            for work in self._works:
                while not work.is_completed() and (left_s := communicator.left_s(start_s)) > 0:
                    with suppress(RuntimeError):
                        work.wait(timedelta(seconds=min(max(left_s, _SHORTEST_S), _SLICE_S)))
                    if not work.is_completed():
                        communicator.check_off()
                        communicator.answer(self._waiting)
        left_s = max(0.0, communicator.left_s(start_s))
        policy, doing = communicator.policy, self._waiting.describe
        if wait_until(self.test, policy=policy, timeout_s=left_s, clock=communicator.clock, doing=doing) is not None:
            abandoned.append((self._works, self._group, self._keep))
            raise self._waiting.timeout(communicator.clock.now_s() - start_s, roll_call=communicator.roll_call)

    def _finish(self) -> None:
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise CommError(
                f"{self._waiting.describe()}: a rank has ended, or the link to it broke: {said_by(error)}"
            ) from error


class MessageRequest(AbstractRequest):
    """Messages that are complete together: by the rank at their other end; and what is done then."""

    def __init__(
        self,
        communicator: AbstractTorchdistWaits,
        waiting: Waiting,
        transfers: Sequence[tuple[int, Transfer]],
        *,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._communicator = communicator
        self._waiting = waiting
        self._transfers = transfers
        self._then = then

    def test(self) -> bool:
        if not self._is_settled():
            self._communicator.mesh.progress(0.0, is_over=self._is_settled)
        return self._is_over()

    def wait(self) -> None:
        communicator = self._communicator
        start_s = communicator.clock.now_s()
        while not self._is_over():
            if (left_s := communicator.left_s(start_s)) <= 0:
                raise self._given_up().timeout(communicator.timeout_s, roll_call=communicator.roll_call)
            communicator.mesh.progress(min(left_s, _SLICE_S), is_over=self._is_settled)
            if not self._is_settled():
                communicator.check_off()
                communicator.answer(self._waiting)

    def _is_settled(self) -> bool:
        return all(transfer.is_settled for _, transfer in self._transfers)

    def _is_over(self) -> bool:
        for peer, transfer in self._transfers:
            if transfer.problem:
                self._fail(peer, transfer)
        if not self._is_settled():
            return False
        then, self._then = self._then, None
        if then is not None:
            then()
        return True

    def _fail(self, peer: int, transfer: Transfer) -> Never:
        self._communicator.check_off()
        if not transfer.is_broken:
            raise CommError(f"{self._waiting.describe()}: {transfer.problem}")
        raise RankDiedError(
            f"{self._waiting.describe()}: rank {peer} has ended, or the link to it broke: {transfer.problem}", rank=peer
        )

    def _given_up(self) -> Waiting:
        open_ones = [(peer, transfer) for peer, transfer in self._transfers if not transfer.is_settled]
        for peer, transfer in open_ones:
            self._communicator.mesh.withdraw(self._communicator.world_ranks[peer], transfer)
        missing = tuple(sorted({peer for peer, _ in open_ones}))
        return self._waiting if self._waiting.peer is not None else replace(self._waiting, missing=missing)


def _memory(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor of the host."""
    return as_bytes(tensor).numpy().data


def said_by(error: RuntimeError) -> str:
    """What gloo says, without the place in its source."""
    return str(error).rpartition("] ")[2].partition(" This is typically")[0]
