"""Messages under way: their memory must stay as it is, and is used again once they have left."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tatami.clock import Clock
from tatami.comm.wait import WaitPolicy
from tatami.errors import InputError, RankDiedError
from tatami.functions.wire import Chunk, Test, wait_closely

LINGER_S = 1e-3
"""How long a sender helps to move a large message, and 1 s more for each GB: MPI moves it while both sides are inside."""
MANY_UNSENT = 32
MOST_UNSENT = 10_000
"""So many may be under way, before the sender waits for the receivers."""
MOST_FREE = 64
"""So many chunks are kept for the next messages."""


@dataclass(slots=True, eq=False)
class Unsent:
    """A message under way.

    Attributes:
        tests: of its transfers.
        chunk: its first part.
        tensors: what is sent from where it lies, with the versions they had.
        operation: for messages.
        is_report: whether nothing depends on it: a rank that has done its part ends without it.
    """

    tests: list[Test]
    chunk: Chunk
    tensors: Sequence[torch.Tensor]
    versions: list[int]
    operation: str
    is_report: bool = False


class Outbox:
    """The messages of one rank that are under way, in the order in which they were sent."""

    def __init__(self, free: list[Chunk], *, rank: int, policy: WaitPolicy, clock: Clock) -> None:
        """`free` gets the chunks back."""
        self._free = free
        self._rank = rank
        self._policy = policy
        self._clock = clock
        self._unsent: deque[Unsent] = deque()

    @property
    def num_unsent(self) -> int:
        """Messages that are not known to have left."""
        return len(self._unsent)

    @property
    def is_full(self) -> bool:
        """Whether no more may be added."""
        return len(self._unsent) >= MOST_UNSENT

    def add(self, unsent: Unsent) -> None:
        """A message that lies in its chunk alone."""
        self._unsent.append(unsent)
        if len(self._unsent) > MANY_UNSENT:
            self.clear()

    def add_large(self, unsent: Unsent, *, size_bytes: int) -> None:
        """A message of which `size_bytes` are sent from where they lie; the sender helps to move it for a moment."""
        self._unsent.append(unsent)
        wait_closely(
            lambda: all(test() for test in unsent.tests),
            policy=self._policy,
            timeout_s=LINGER_S + size_bytes * 1e-9,
            clock=self._clock,
        )

    def clear(self) -> None:
        """Forget what has been sent, in order.

        Raises:
            InputError: a tensor was changed before it had left.
            RankDiedError: a rank has ended without what it was sent.
        """
        while self._unsent:
            done = self._unsent[0]
            try:
                if not all(test() for test in done.tests):
                    return
            except RankDiedError:
                if not done.is_report:
                    raise
                self._unsent.popleft()
                continue
            self._unsent.popleft()
            if len(self._free) < MOST_FREE:
                self._free.append(done.chunk)
            if done.tensors and done.versions != [tensor._version for tensor in done.tensors]:
                raise InputError(
                    f"{done.operation}: the tensor was changed in place before it had left rank {self._rank}; send a "
                    "clone, or change it after the receiver has answered"
                )
