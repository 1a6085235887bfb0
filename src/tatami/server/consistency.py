"""How far workers may drift apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from tatami.errors import InputError


class AbstractConsistency(ABC):
    """When a worker may begin a round, and when updates are applied.

    Attributes:
        lockstep: updates of one round are applied together, and all workers begin the next at once. Else each update is
            applied as soon as it is whole, as one optimizer step.
    """

    lockstep: ClassVar[bool]

    @abstractmethod
    def may_start(self, clock: int, *, slowest: int) -> bool:
        """Whether a worker that has done `clock` rounds may begin its next while the slowest has done `slowest`."""

    @abstractmethod
    def closes(self, *, pushed: int, waiting: int, out: int) -> bool:
        """Whether the open round is applied now: of its workers, `pushed` are done, `waiting` are not, `out` never will be."""


@dataclass(frozen=True, kw_only=True)
class BSP(AbstractConsistency):
    """Bulk synchronous: a round is applied when all updates are there: the gradient of the whole batch, the same to the bit."""

    lockstep: ClassVar[bool] = True

    def may_start(self, clock: int, *, slowest: int) -> bool:
        return clock == slowest

    def closes(self, *, pushed: int, waiting: int, out: int) -> bool:  # noqa: ARG002 - BSP only asks who is still at work
        return waiting == 0


@dataclass(frozen=True, kw_only=True)
class Backup(AbstractConsistency):
    """A round is applied when all but `workers` of the updates are there; the last ones are dropped.

    Source: Chen et al., "Revisiting distributed synchronous SGD", 2016.
    """

    workers: int = 1
    lockstep: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InputError(f"Backup(workers=...) must be at least 1, not {self.workers}; without backup workers it is BSP()")

    def may_start(self, clock: int, *, slowest: int) -> bool:
        return clock == slowest

    def closes(self, *, pushed: int, waiting: int, out: int) -> bool:
        return waiting == 0 or (pushed > 0 and waiting + out <= self.workers)


@dataclass(frozen=True, kw_only=True)
class SSP(AbstractConsistency):
    """Stale synchronous: a worker may be at most `staleness` rounds ahead of the slowest; every update is applied as it comes.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
    """

    staleness: int = 1
    lockstep: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise InputError(f"SSP(staleness=...) must be at least 0 rounds, not {self.staleness}")

    def may_start(self, clock: int, *, slowest: int) -> bool:
        return clock - slowest <= self.staleness

    def closes(self, *, pushed: int, waiting: int, out: int) -> bool:  # noqa: ARG002 - each update is for itself
        return pushed > 0


@dataclass(frozen=True, kw_only=True)
class ASP(AbstractConsistency):
    """Asynchronous: every update is applied as it comes, however far its worker is ahead."""

    lockstep: ClassVar[bool] = False

    def may_start(self, clock: int, *, slowest: int) -> bool:  # noqa: ARG002 - no worker waits
        return True

    def closes(self, *, pushed: int, waiting: int, out: int) -> bool:  # noqa: ARG002 - each update is for itself
        return pushed > 0
