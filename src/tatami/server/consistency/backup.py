"""Backup workers: the first W of W + b updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tatami.errors import InputError
from tatami.server.consistency.base import AbstractConsistency


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
