"""Stale synchronous: no worker runs too far ahead of the slowest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tatami.errors import InputError
from tatami.server.consistency.base import AbstractConsistency


@dataclass(frozen=True, kw_only=True)
class SSP(AbstractConsistency):
    """A worker may be at most `staleness` rounds ahead of the slowest; every update is applied as it comes.

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
