"""What a consistency rule decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


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
