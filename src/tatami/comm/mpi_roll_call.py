"""The roll call of MPI's ranks: small messages on a communicator of their own, looked for only by ranks that wait for long."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, final

from tatami.clock import Clock
from tatami.comm.roll_call import AbstractRollCall, ProcessPlace

_QUESTION, _ANSWER = 0, 1
_NUMBER_BYTES = 8
_MESSAGE_BYTES = 256
"""So small that MPI takes a message to a rank that does not receive it."""
_LOOK_S = 2e-3


@final
class MpiRollCall(AbstractRollCall):
    """Takes over `comm`, an mpi4py communicator of all ranks on which nothing else is sent."""

    def __init__(self, comm: Any, *, mpi: ModuleType, places: Sequence[ProcessPlace], clock: Clock) -> None:
        super().__init__(rank=comm.Get_rank(), places=places)
        self._comm = comm
        self._mpi = mpi
        self._clock = clock
        self._lock = threading.Lock()
        self._number = 0
        self._sent: list[tuple[Any, bytes]] = []

    def answer(self, doing: str) -> None:
        if self._lock.acquire(blocking=False):  # another thread of this rank answers already
            try:
                self._answer_all(doing)
            finally:
                self._lock.release()

    def ask(self, doing: str, *, patience_s: float) -> dict[int, str]:
        found: dict[int, str] = {}
        with self._lock:
            self._number += 1
            others = [rank for rank in range(len(self.places)) if rank != self.rank]
            for rank in others:
                self._send(_number_bytes(self._number), rank, _QUESTION)
            end_s = self._clock.now_s() + patience_s
            while len(found) < len(others) and self._clock.now_s() < end_s:
                self._answer_all(doing)
                while (came := self._receive(_ANSWER)) is not None:
                    rank, message = came
                    if message[:_NUMBER_BYTES] == _number_bytes(self._number):  # and not of an earlier question
                        found[rank] = message[_NUMBER_BYTES:].decode(errors="replace")
                self._clock.sleep(_LOOK_S)
        return found

    def _answer_all(self, doing: str) -> None:
        text = doing.encode()[: _MESSAGE_BYTES - _NUMBER_BYTES]
        while (came := self._receive(_QUESTION)) is not None:
            rank, message = came
            self._send(message[:_NUMBER_BYTES] + text, rank, _ANSWER)

    def _send(self, message: bytes, rank: int, tag: int) -> None:
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self._sent.append((self._comm.Isend([message, self._mpi.BYTE], rank, tag), message))

    def _receive(self, tag: int) -> tuple[int, bytes] | None:
        status = self._mpi.Status()
        if not self._comm.Iprobe(self._mpi.ANY_SOURCE, tag, status):
            return None
        room = bytearray(status.Get_count(self._mpi.BYTE))
        self._comm.Recv([room, self._mpi.BYTE], status.Get_source(), tag)
        return status.Get_source(), bytes(room)


def _number_bytes(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "little")
