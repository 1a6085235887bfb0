"""Who is there: after a wait that ended without its message, the rank asks all others what they do, and says who is silent.

A collective of MPI cannot tell who has not come, and the one that did not is often waiting for another rank: rank 0 waits for
rank 1, which waits for rank 2, which was stopped. So ranks that wait for long answer questions, each by what it waits for
itself; one that computes, is stopped or has died does not answer, and of those on its own machine a rank knows which it is.
"""

from __future__ import annotations

import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self, final

from tatami.clock import Clock
from tatami.comm.refusals import GRACE_S, Refusals

SHORTEST_S, LONGEST_S = 1.0, 5.0
"""How long answers are waited for: a tenth of the time that was waited before, within these bounds."""
_NAMED = 8
"""So many ranks are named; a list of a thousand numbers would not be read."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """Where a rank's process is.

    Attributes:
        host: as its machine calls itself.
        kernel: what only processes have in common that see one another: the kernel's start and the name space of numbers.
        pid: its number there.
    """

    host: str
    kernel: str
    pid: int

    @classmethod
    def here(cls) -> Self:
        """Where this process is."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            kernel = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            kernel = ""
        return cls(host=socket.gethostname(), kernel=kernel, pid=os.getpid())


class AbstractRollCall(ABC):
    """Questions and answers among all ranks of a job, on ways of their own.

    Attributes:
        places: of all ranks' processes.
        refusals: the failures that ranks send each other.
    """

    def __init__(self, *, rank: int, places: Sequence[ProcessPlace]) -> None:
        self.rank = rank
        self.places = tuple(places)
        self.refusals = Refusals(self.send_refusal, rank=rank, grace_s=GRACE_S)

    @abstractmethod
    def send_refusal(self, message: bytes) -> None:
        """Bring a message to the `refusals` of all other ranks, which look for it in their waits. Returns at once."""

    @abstractmethod
    def answer(self, doing: str) -> None:
        """Answer those who have asked, if there are any: this rank waits in `doing`. Returns at once."""

    @abstractmethod
    def ask(self, doing: str, *, patience_s: float) -> dict[int, str]:
        """What other ranks wait in, of those that answer; meanwhile this one answers, too."""

    def findings(self, doing: str, *, size: int, waited_s: float) -> str:
        """Sentences for the error of a wait in `doing` that ended after `waited_s` seconds; empty for a rank alone.

        Args:
            size: how many ranks that wait was among; where these are not all, numbers are of another communicator than its own.
        """
        if len(self.places) == 1:
            return ""
        said = self.ask(doing, patience_s=min(max(waited_s / 10, SHORTEST_S), LONGEST_S))
        text = describe_findings(said, rank=self.rank, places=self.places)
        return text if size == len(self.places) else f"Of all {len(self.places)} ranks of the job: {text}"


def describe_findings(said: Mapping[int, str], *, rank: int, places: Sequence[ProcessPlace]) -> str:
    """What is known of the ranks, the silent ones first; `said` is by whom, who asked is `rank`."""
    sentences = []
    silent = [other for other in range(len(places)) if other != rank and other not in said]
    for other in silent[:_NAMED]:
        sentences.append(
            f"Rank {other} (pid {places[other].pid} on {places[other].host}) {_silence_of(places[other], places[rank])}."
        )
    if len(silent) > _NAMED:
        sentences.append(f"{len(silent) - _NAMED} more do not answer.")
    doing: dict[str, list[int]] = {}
    for other in sorted(said):
        doing.setdefault(said[other].removesuffix(f" on rank {other} of {len(places)}"), []).append(other)
    for what, ranks in doing.items():
        sentences.append(f"{format_ranks(ranks).capitalize()} wait{'s' if len(ranks) == 1 else ''} in {what}.")
    return " ".join(sentences)


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 5`, or `ranks 5, 7`; not all of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rest = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{rest}"


def _silence_of(place: ProcessPlace, own: ProcessPlace) -> str:
    if not place.kernel or (place.host, place.kernel) != (own.host, own.kernel):
        return "does not answer: it computes, was stopped, has died, or cannot be reached"
    try:
        state = Path(f"/proc/{place.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    if state in "ZX":
        return "has ended"
    if state in "Tt":
        return f"was stopped by a signal: `kill -CONT {place.pid}` lets it go on"
    return "is alive, but does not wait for other ranks: it computes, or waits for something else"


_COUNT_EVERY_S = 0.25
_STORE_LOOK_S = 0.05


@final
class StoreRollCall(AbstractRollCall):
    """Over a store of torch.distributed that only these ranks use: those that wait for long count there."""

    def __init__(self, store: Any, *, rank: int, places: Sequence[ProcessPlace], clock: Clock) -> None:
        super().__init__(rank=rank, places=places)
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._counted_s = float("-inf")
        self._num_refusals = 0

    def answer(self, doing: str) -> None:
        with self._lock:
            if self._clock.now_s() < self._counted_s + _COUNT_EVERY_S:
                return
            self._counted_s = self._clock.now_s()
            self._count += 1
            text = f"{self._count} {doing}"
        with suppress(RuntimeError):  # the process that keeps the store has ended
            self._store.set(str(self.rank), text)
            while self._store.check([f"refusal {self._num_refusals + 1}"]):
                self._num_refusals += 1
                self.refusals.receive(self._store.get(f"refusal {self._num_refusals}"))

    def send_refusal(self, message: bytes) -> None:
        with suppress(RuntimeError):
            self._store.set(f"refusal {self._store.add('refusals', 1)}", message)

    def ask(self, doing: str, *, patience_s: float) -> dict[int, str]:
        found: dict[int, str] = {}
        with suppress(RuntimeError):
            others = [rank for rank in range(len(self.places)) if rank != self.rank]
            before = self._read(others)
            end_s = self._clock.now_s() + patience_s
            while len(found) < len(others) and self._clock.now_s() < end_s:
                self.answer(doing)
                self._clock.sleep(_STORE_LOOK_S)
                now = self._read(others)
                found = {rank: text.partition(" ")[2] for rank, text in now.items() if text != before.get(rank)}
        return found

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        """What those have written that have waited for long at some time; asking for what is not there would wait for it."""
        there = [rank for rank in ranks if self._store.check([str(rank)])]
        return {rank: self._store.get(str(rank)).decode(errors="replace") for rank in there}


_QUESTION, _ANSWER, _REFUSAL = 0, 1, 2
_NUMBER_BYTES = 8
_MESSAGE_BYTES = 256
"""So small that MPI takes a message to a rank that does not receive it."""
_MPI_LOOK_S = 2e-3


@final
class MpiRollCall(AbstractRollCall):
    """By small messages, looked for only by ranks that wait for long. Takes over `comm`, an mpi4py communicator of its own."""

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

    def send_refusal(self, message: bytes) -> None:
        with self._lock:
            for rank in range(len(self.places)):
                if rank != self.rank:
                    self._send(message, rank, _REFUSAL)

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
                self._clock.sleep(_MPI_LOOK_S)
        return found

    def _answer_all(self, doing: str) -> None:
        text = doing.encode()[: _MESSAGE_BYTES - _NUMBER_BYTES]
        while (came := self._receive(_QUESTION)) is not None:
            rank, message = came
            self._send(message[:_NUMBER_BYTES] + text, rank, _ANSWER)
        while (came := self._receive(_REFUSAL)) is not None:
            self.refusals.receive(came[1])

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
