"""Waits of ranks of torch.distributed: for the works of a collective, and for messages; each ends, and says for whom it was.

A wait for a message happens in a thread of its own: gloo closes all connections when it gives up a wait itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from tatami.clock import SystemClock
from tatami.comm.base import AbstractRequest
from tatami.comm.checked import CheckedCommunicator
from tatami.comm.roll_call import AbstractRollCall
from tatami.comm.staging import is_on_host
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
    """

    policy: WaitPolicy

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
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

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

    def start_thread(self, run: Callable[[], object], *, name: str) -> None:
        """In which a message is waited for."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()


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
            return False
        self._finish()
        return True

    def wait(self) -> None:
        communicator = self._communicator
        start_s = communicator.clock.now_s()
        if is_on_host(self._keep[0]):
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


@contextmanager
def over_its_link(waiting: Waiting) -> Iterator[None]:
    """What gloo raises where the link to the peer broke becomes an error that names it."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        assert waiting.peer is not None
        raise RankDiedError(
            f"{waiting.describe()}: rank {waiting.peer} has ended, or the link to it broke: {said_by(error)}", rank=waiting.peer
        ) from error


class MessageRequest(AbstractRequest):
    """A message, moved by `move` in a thread of its own."""

    def __init__(self, communicator: AbstractTorchdistWaits, waiting: Waiting, move: Callable[[], object]) -> None:
        self._communicator = communicator
        self._waiting = waiting
        self._move = move
        self._done = threading.Event()
        self._error: Exception | None = None
        communicator.start_thread(self._run, name=f"tatami {waiting.describe()}")

    def test(self) -> bool:
        if not self._done.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self) -> None:
        communicator = self._communicator
        start_s = communicator.clock.now_s()
        while not self._done.wait(min(max(left_s := communicator.left_s(start_s), 0.0), _SLICE_S)):
            if left_s <= 0:
                raise self._waiting.timeout(communicator.timeout_s, roll_call=communicator.roll_call)
            communicator.check_off()
            communicator.answer(self._waiting)
        self.test()

    def _run(self) -> None:
        try:
            with over_its_link(self._waiting):
                self._move()
        except CommError as error:
            self._error = error
        self._done.set()


def said_by(error: RuntimeError) -> str:
    """What gloo says, without the place in its source."""
    return str(error).rpartition("] ")[2].partition(" This is typically")[0]
