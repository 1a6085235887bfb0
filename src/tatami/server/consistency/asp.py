"""Asynchronous: no worker waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tatami.server.consistency.base import AbstractConsistency


@dataclass(frozen=True, kw_only=True)
class ASP(AbstractConsistency):
    """Every update is applied as it comes, however far its worker is ahead."""

    lockstep: ClassVar[bool] = False

    def may_start(self, clock: int, *, slowest: int) -> bool:  # noqa: ARG002 - no worker waits
        return True

    def closes(self, *, pushed: int, waiting: int, out: int) -> bool:  # noqa: ARG002 - each update is for itself
        return pushed > 0
