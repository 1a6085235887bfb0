"""A worker's place in the run, which different processes may hold in turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    """Where the holder of a place is in its round."""

    IDLE = "idle"
    BUSY = "busy"
    PUSHED = "pushed"
    OUT = "out"
    """This round closes without it."""


@dataclass(kw_only=True)
class Place:
    """Worker number `worker`: its share of the data and its part of the sum, which outlive the processes that hold it.

    Attributes:
        process: who holds it; None while it waits for a spare.
        clock: rounds that are done.
        members: among whom the batch of the open round is divided.
        received: (shard, server) that have the update of the open round.
        pushed_by: whose update of the open round is whole; a spare may have taken the place since.
        sent: a process was sent the task of the open round.
        leaving: it ends after the open round.
        counts: of all places of the run by status, kept here because counting ten thousand places for each event would take
            too long.
    """

    worker: int
    process: int | None
    clock: int = 0
    members: tuple[int, ...] = ()
    received: set[tuple[int, int]] = field(default_factory=set)
    pushed_by: int | None = None
    sent: bool = False
    leaving: bool = False
    counts: Counter[Status] = field(default_factory=Counter, repr=False)
    _status: Status = Status.IDLE

    def __post_init__(self) -> None:
        self.counts[self._status] += 1

    @property
    def status(self) -> Status:
        return self._status

    @status.setter
    def status(self, value: Status) -> None:
        self.counts[self._status] -= 1
        self.counts[value] += 1
        self._status = value

    def vanish(self) -> None:
        """Take the place out of the run's counts."""
        self.counts[self._status] -= 1

    def reset(self, clock: int) -> None:
        """Go to the beginning of round `clock`."""
        self.clock = clock
        self.status = Status.IDLE
        self.received = set()
        self.pushed_by = None
        self.sent = False

    def is_vacant(self, *, rounds: int) -> bool:
        """Whether a spare is needed here."""
        needed = self.status is Status.BUSY or not self.leaving
        return self.process is None and needed and self.clock < rounds

    def can_take_part(self, *, rounds: int, unmanned: bool) -> bool:
        """Whether it belongs to the next round; `unmanned` is whether rounds wait for spares."""
        return (unmanned or self.process is not None) and not self.leaving and self.clock < rounds
