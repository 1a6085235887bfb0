"""What opens and closes a round of puts: one class for each kind of synchronisation, over any backend's window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tatami.collective import Sync
from tatami.comm.base import AbstractCommunicator
from tatami.comm.memory_barrier import meet, notices
from tatami.comm.window import AbstractWindow

_TAG = 1
"""Tag of notices under locks and of barriers, on the executor's own communicator, whose messages have tag 0."""


class AbstractEpochs(ABC):
    """The epochs of one phase on one rank. Ranks are those of `window`."""

    def __init__(self, window: AbstractWindow, comm: AbstractCommunicator, *, ranks: Sequence[int]) -> None:
        """`ranks` are those of the group, of `comm`."""
        self.window = window
        self.comm = comm
        self.ranks = ranks

    def enter(self) -> None:  # noqa: B027 - most kinds do nothing
        """Once, before the first round."""

    @abstractmethod
    def open(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Before the puts of a round: from `sources` to this rank, from this rank to `targets`."""

    @abstractmethod
    def close(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """After them: what came in the round has arrived, and what was put may be changed."""


class FenceEpochs(AbstractEpochs):
    """All ranks of the window meet before the first round and after each."""

    def enter(self) -> None:
        self.window.fence()

    def open(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The fence before was it."""

    def close(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:  # noqa: ARG002 - everyone
        self.window.fence()


class PscwEpochs(AbstractEpochs):
    """Post, start, complete, wait: the peers of the round alone."""

    def open(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.window.post(sources)
        if targets:
            self.window.start(targets)

    def close(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        if targets:
            self.window.complete()
        if sources:
            self.window.wait()


class LockEpochs(AbstractEpochs):
    """Flush, then tell the target by an empty message."""

    def enter(self) -> None:
        meet(self.comm, self.ranks, tag=_TAG)

    def open(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """A lock is held for as long as the window lives."""

    def close(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        for target in targets:
            self.window.flush(target)
        notices(self.comm, to=targets, by=sources, tag=_TAG)


EPOCHS: dict[Sync, type[AbstractEpochs]] = {Sync.FENCE: FenceEpochs, Sync.PSCW: PscwEpochs, Sync.LOCK: LockEpochs}
