"""One iteration on a stage: compute 1, vertical, compute 2, horizontal, compute 3, each processor at its own pace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tatami.sim.allreduce import Replay, Software
from tatami.sim.stage import Stage, Then
from tatami.sim.tiling.changes import Speeds
from tatami.sim.tiling.floor import Floor, Sum


@dataclass(kw_only=True)
class Times:
    """When a rank was where, in simulated seconds."""

    began_s: float
    forward_s: float = 0.0
    vertical_s: float = 0.0
    backward_s: float = 0.0
    horizontal_s: float = 0.0
    update_s: float = 0.0

    @property
    def ended_s(self) -> float:
        return self.began_s + self.t1_s + self.horizontal_s + self.update_s

    @property
    def t1_s(self) -> float:
        return self.forward_s + self.vertical_s + self.backward_s

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Iteration:
    """Starts every rank at its time and tells `done` when the last has ended.

    Args:
        stage: where; rank r is host r.
        floor: who computes and sends what.
        speeds: of the processors.
        begin_s: the stage's time at which each rank begins.
        ahead_s: what the run's time is ahead of the stage's.
        element_bytes: 4 for float32.
        software: what ranks add to the wires.
        done: told of the times of all ranks, on the stage's clock.
    """

    def __init__(
        self,
        stage: Stage,
        floor: Floor,
        *,
        speeds: Speeds,
        begin_s: Mapping[int, float],
        ahead_s: float,
        element_bytes: int,
        software: Software,
        done: Callable[[dict[int, Times]], None],
    ) -> None:
        self._stage = stage
        self._floor = floor
        self._speeds = speeds
        self._ahead_s = ahead_s
        self._element_bytes = element_bytes
        self._software = software
        self._done = done
        self._replays: dict[tuple[int, int], Replay] = {}
        self._then: dict[tuple[int, int, int], Then] = {}
        self._times: dict[int, Times] = {}
        self._going = len(begin_s)
        for rank, at_s in begin_s.items():
            stage.at(at_s, lambda rank=rank: self._begin(rank))  # type: ignore[misc]

    def _begin(self, rank: int) -> None:
        times = self._times[rank] = Times(began_s=self._stage.now_s)
        work = self._floor.work[rank]

        def forward_done(spent_s: float) -> None:
            times.forward_s = spent_s
            self._vertical(rank, 0, lambda: self._stretch(backward_flop, backward_done, rank))

        backward_flop = work.backward_flop
        since_s = self._stage.now_s

        def backward_done(spent_s: float) -> None:
            times.backward_s = spent_s
            times.vertical_s = self._stage.now_s - since_s - times.forward_s - spent_s
            begun_s = self._stage.now_s
            self._horizontal(rank, lambda: self._stretch(work.update_flop, update_done(begun_s), rank))

        def update_done(begun_s: float) -> Callable[[float], None]:
            def ended(spent_s: float) -> None:
                times.update_s = spent_s
                times.horizontal_s = self._stage.now_s - begun_s - spent_s
                self._end()

            return ended

        self._stretch(work.forward_flop, forward_done, rank)

    def _stretch(self, work_flop: float, then: Callable[[float], None], rank: int) -> None:
        """Compute; a timer, since nobody shares a processor, and thousands of them are cheap."""
        begin_s = self._stage.now_s + self._ahead_s
        spent_s = self._speeds.finish_s(self._floor.names[rank], work_flop=work_flop, begin_s=begin_s) - begin_s
        self._stage.after(spent_s, lambda: then(spent_s))

    def _vertical(self, rank: int, exchange: int, then: Then) -> None:
        found = self._floor.vertical[rank]
        if found is None or exchange == self._floor.exchanges:
            then()
            return
        column, place = found
        self._sum(column, exchange, place, lambda: self._vertical(rank, exchange + 1, then))

    def _horizontal(self, rank: int, then: Then) -> None:
        across, replicated = self._floor.horizontal, self._floor.replicated
        if across is None:
            then()
            return

        def rest() -> None:
            if replicated is None:
                then()
            else:
                self._sum(replicated, 0, replicated.place_of[rank], then)

        self._sum(across, 0, across.place_of[rank], rest)

    def _sum(self, what: Sum, number: int, place: int, then: Then) -> None:
        """Take part in a sum as its member `place`."""
        key = (id(what), number)
        if key not in self._replays:
            self._replays[key] = Replay(
                self._stage,
                what.schedule,
                hosts=what.ranks,
                element_bytes=self._element_bytes,
                software=self._software,
                done=lambda member: self._then.pop((*key, member))(),
                skip=False,
            )
        self._then[*key, place] = then
        self._replays[key].enter(place)

    def _end(self) -> None:
        self._going -= 1
        if self._going == 0:
            self._done(self._times)
