"""Waits of ranks of torch.distributed for messages; each ends, and says for whom it was."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Never

import torch

from tatami.clock import SystemClock
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.checked import as_bytes
from tatami.comm.stall_report import AbstractRollCall
from tatami.comm.tcp_connection import Transfer
from tatami.comm.tcp_mesh import TcpMesh
from tatami.comm.wait import Waiting, WaitPolicy
from tatami.errors import CommError, RankDiedError

_SLICE_S = 0.25
"""So long a wait goes on before it is looked whether another rank asks what this one does."""


class AbstractTcpWaits(AbstractCommunicator):
    """How a rank waits.

    Attributes:
        policy: how polls for what is not a message are spaced.
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

    @property
    def lineage(self) -> str:
        return self._name

    def left_s(self, start_s: float) -> float:
        """What is left of the timeout of a wait that began then."""
        return self.timeout_s - (self.clock.now_s() - start_s)

    @property
    def ends_with_its_ranks(self) -> bool:
        """Whether no other communicator follows where a rank ends."""
        return self._off is None

    def answer(self, waiting: Waiting) -> None:
        """In a long wait: answer those who ask, and raise what another rank has failed with."""
        if self._roll_call is not None:
            self._roll_call.answer(waiting.describe())
            needs = self.world_ranks if waiting.peer is None else (self.world_ranks[waiting.peer],)
            self._roll_call.refusals.check(self._name, needs, now_s=self.clock.now_s())

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

    def _seeking(self, source: int, out: torch.Tensor) -> tuple[int, Transfer]:
        return source, self._mesh.seek(self.world_ranks[source], self._number, _memory(out))


class MessageRequest(AbstractRequest):
    """Messages that are complete together, by the rank at their other end; then those of the next phase.

    A phase begins in whatever wait of this rank the one before ends, as the other ranks may wait for its messages.
    """

    def __init__(
        self,
        communicator: AbstractTcpWaits,
        waiting: Waiting,
        *phases: Callable[[], Sequence[tuple[int, Transfer]]],
    ) -> None:
        """
        Args:
            phases: each begins its messages when those of the phase before are complete; the first one's begin now.
        """
        self._communicator = communicator
        self._waiting = waiting
        self._phases = deque(phases)
        self._transfers = self._phases.popleft()()
        if self._phases and not self._advance():
            communicator.mesh.pursue(self._advance)

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
                try:
                    communicator.answer(self._waiting)
                except Exception:
                    self._given_up()
                    raise

    def _advance(self) -> bool:
        """Begin what can begin now; whether no phase will have to be begun any more."""
        while self._phases and self._are_settled():
            if any(transfer.problem for _, transfer in self._transfers):
                self._phases.clear()
            else:
                self._transfers = self._phases[0]()
                self._phases.popleft()
        return not self._phases

    def _are_settled(self) -> bool:
        return all(transfer.is_settled for _, transfer in self._transfers)

    def _is_settled(self) -> bool:
        return not self._phases and self._are_settled()

    def _is_over(self) -> bool:
        for peer, transfer in self._transfers:
            if transfer.problem:
                self._fail(peer, transfer)
        return self._is_settled()

    def _fail(self, peer: int, transfer: Transfer) -> Never:
        self._communicator.check_off()
        if not transfer.is_broken:
            raise CommError(f"{self._waiting.describe()}: {transfer.problem}")
        if self._communicator.ends_with_its_ranks:  # the peer may have said why it ends
            self._communicator.answer(self._waiting)
        raise RankDiedError(
            f"{self._waiting.describe()}: rank {peer} has ended, or the link to it broke: {transfer.problem}", rank=peer
        )

    def _given_up(self) -> Waiting:
        self._phases.clear()
        open_ones = [(peer, transfer) for peer, transfer in self._transfers if not transfer.is_settled]
        for peer, transfer in open_ones:
            self._communicator.mesh.withdraw(self._communicator.world_ranks[peer], transfer)
        missing = tuple(sorted({peer for peer, _ in open_ones}))
        return self._waiting if self._waiting.peer is not None else replace(self._waiting, missing=missing)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    return as_bytes(tensor).numpy().data


def said_by(error: RuntimeError) -> str:
    """What torch's store, or NCCL, says, without the place in its source."""
    return str(error).rpartition("] ")[2].partition(" This is typically")[0]
