"""Who works: the places of a run, the spares, and who takes a vacant place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tatami.server import actions as act
from tatami.server.actions import Action
from tatami.server.recovery import Remedy
from tatami.server.run_settings import RunSettings


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


class Roster:
    """Keeps places and spares; what is to be done about them goes to `do`.

    Args:
        clocks: rounds done by worker, of a run that goes on; `slowest` holds for workers that are not in it.

    Attributes:
        places: by worker number.
        ready: processes that stand by, the longest first.
        starting: processes that are being started.
        restarts_left: further processes that may be started, workers and servers together.
        counts: of the places, by status.
    """

    def __init__(self, settings: RunSettings, *, clocks: Mapping[int, int], slowest: int, do: Callable[[Action], None]) -> None:
        self._settings = settings
        self._do = do
        self.counts: Counter[Status] = Counter()
        self.places = {
            worker: Place(worker=worker, process=worker, clock=clocks.get(worker, slowest), counts=self.counts)
            for worker in range(settings.workers)
        }
        self.ready: list[int] = []
        self.starting: set[int] = set()
        self.restarts_left = settings.restarts
        self._next_process = settings.workers
        self._next_worker = settings.workers
        self._joins = 0

    # -- processes ------------------------------------------------------------------------------------------------

    def start_spare(self) -> None:
        self.starting.add(self._next_process)
        self._do(act.StartSpare(process=self._next_process))
        self._next_process += 1

    def join(self) -> None:
        """Note that one more worker is wanted."""
        self._joins += 1
        self.start_spare()

    def is_ready(self, process: int) -> None:
        """Note that a spare is up, unless it was declared dead in the meantime."""
        if process in self.starting:
            self.starting.discard(process)
            self.ready.append(process)

    def lose(self, process: int) -> bool:
        """Note that a process is gone; returns whether it held a place."""
        self.starting.discard(process)
        if process in self.ready:
            self.ready.remove(process)
        held = [place for place in self.places.values() if place.process == process]
        for place in held:
            place.process = None
            if place.status is Status.BUSY:
                place.received = set()
                if self._settings.recovery.remedy is Remedy.SKIP:
                    place.status = Status.OUT
        return bool(held)

    def staff(self, *, is_over: bool) -> tuple[Place, ...]:
        """Give vacant places to spares, start new spares, and give up places for which none will come.

        Returns:
            The places that a process has taken over in the middle of a round: they must be sent their task.
        """
        vacant = [place for _, place in sorted(self.places.items()) if place.is_vacant(rounds=self._settings.rounds)]
        taken = []
        while vacant and self.ready:
            place = vacant.pop(0)
            place.process = self.ready.pop(0)
            if place.status is Status.BUSY:
                taken.append(place)
        if is_over:
            return tuple(taken)
        wanted = len(vacant) + self._joins + self._settings.spares
        while len(self.ready) + len(self.starting) < wanted and self.restarts_left > 0:
            self.restarts_left -= 1
            self.start_spare()
        if self.starting or self.ready:
            return tuple(taken)
        self._joins = 0
        for place in vacant:
            place.leaving = True
            if place.status is Status.BUSY:
                place.status = Status.OUT
            left = self.num_staying()
            self.warn(f"no spare is left for worker {place.worker}: {left} workers share its part from now on")
        return tuple(taken)

    # -- coming and going -----------------------------------------------------------------------------------------

    def let_go(self, worker: int) -> None:
        place = self.places.get(worker)
        if place is None or place.leaving:
            self.warn(f"there is no worker {worker} that could leave; there are {sorted(self.places)}")
        elif self.num_staying() <= self._settings.min_workers:
            self.warn(f"worker {worker} stays: with fewer than min_workers={self._settings.min_workers} the run would stop")
        else:
            place.leaving = True

    def drop_leavers(self) -> None:
        for worker, place in list(self.places.items()):
            if place.leaving and place.status is Status.IDLE:
                if place.process is not None:
                    self._do(act.EndProcess(process=place.process))
                place.vanish()
                del self.places[worker]

    def admit(self, *, slowest: int) -> None:
        """Give the processes that join new places."""
        while self._joins and self.ready and (not self._settings.consistency.lockstep or self.all_idle()):
            self._joins -= 1
            worker = self._next_worker  # never a number that was used before: updates are told apart by it
            self._next_worker += 1
            self.places[worker] = Place(worker=worker, process=self.ready.pop(0), clock=slowest, counts=self.counts)

    def return_to(self, clocks: Mapping[int, int], *, slowest: int) -> None:
        """Set all workers back to these clocks."""
        for worker, place in self.places.items():
            place.reset(clocks.get(worker, slowest))

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def clocks(self) -> tuple[tuple[int, int], ...]:
        """Rounds done, by worker."""
        return tuple((place.worker, place.clock) for place in self.in_order())

    def in_order(self) -> list[Place]:
        return [place for _, place in sorted(self.places.items())]

    def all_idle(self) -> bool:
        return self.counts[Status.IDLE] == len(self.places)

    def num_staying(self) -> int:
        return sum(not place.leaving for place in self.places.values())

    def slowest(self, *, default: int) -> int:
        """Rounds done by the slowest worker that stays; a place whose rounds are all done does not count."""
        return min((place.clock for place in self.places.values() if not place.leaving), default=default)

    def all_done(self) -> bool:
        return bool(self.places) and all(place.clock >= self._settings.rounds for place in self.places.values())

    def warn(self, message: str) -> None:
        self._do(act.Warn(message=message))
