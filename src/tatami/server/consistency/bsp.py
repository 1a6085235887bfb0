"""Bulk synchronous: every round has the updates of all workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tatami.server.consistency.base import AbstractConsistency


@dataclass(frozen=True, kw_only=True)
class BSP(AbstractConsistency):
    """A round is applied when all workers' updates are there: the gradient of the whole batch, reproducible to the bit."""

    lockstep: ClassVar[bool] = True

    def may_start(self, clock: int, *, slowest: int) -> bool:
        return clock == slowest

    def closes(self, *, pushed: int, waiting: int, out: int) -> bool:  # noqa: ARG002 - BSP only asks who is still at work
        return waiting == 0
