"""One iteration on a stage, each processor at its own pace.

Forward and backward, block by block, with a sum over the replica after each; then gradient sums, and compute 3. Gradients that
leave earlier cross the links meanwhile, and take no time of the processor beside that of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tatami.sim.allreduce import Replay, Software
from tatami.sim.stage import Stage, Then
from tatami.sim.tiling.changes import Speeds
from tatami.sim.tiling.iteration_plan import Floor, FloorSum


@dataclass(kw_only=True)
class Times:
    """When a rank was where, in simulated seconds."""

    began_s: float
    forward_s: float = 0.0
    tensor_parallel_s: float = 0.0
    backward_s: float = 0.0
    gradients_s: float = 0.0
    update_s: float = 0.0

    @property
    def ended_s(self) -> float:
        return self.began_s + self.t1_s + self.gradients_s + self.update_s

    @property
    def t1_s(self) -> float:
        return self.forward_s + self.tensor_parallel_s + self.backward_s

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Iteration:
    """Starts every rank at its time and tells `done` when the last has ended.

    Args:
        stage: where; rank r is host r.
        floor: who computes and sends what.
        begin_s: the stage's time at which each rank begins.
        ahead_s: what the run's time is ahead of the stage's.
        done: called with the times of all ranks, on the stage's clock.
    """

    def __init__(
        self,
        stage: Stage,
        floor: Floor,
        *,
        speeds: Speeds,
        begin_s: Mapping[int, float],
        ahead_s: float,
        software: Software,
        done: Callable[[dict[int, Times]], None],
    ) -> None:
        self._stage = stage
        self._floor = floor
        self._speeds = speeds
        self._ahead_s = ahead_s
        self._software = software
        self._alone = software.without_stagger()
        self._done = done
        self._replays: dict[int, Replay] = {}
        self._then: dict[tuple[int, int], Then] = {}
        self._times: dict[int, Times] = {}
        self._leaving: dict[int, int] = dict.fromkeys(begin_s, 0)
        self._last: dict[int, Then] = {}
        self._going = len(begin_s)
        for rank, at_s in begin_s.items():
            stage.at(at_s, lambda rank=rank: self._begin(rank))  # type: ignore[misc]

    def _begin(self, rank: int) -> None:
        self._times[rank] = Times(began_s=self._stage.now_s)
        self._leg(rank, 0)

    def _leg(self, rank: int, number: int) -> None:
        """Compute, sum over the replica, and go on with the next."""
        times, legs = self._times[rank], self._floor.legs[rank]
        if number == len(legs):
            times.tensor_parallel_s = self._stage.now_s - times.began_s - times.compute_s
            self._across(rank)
            return
        leg = legs[number]

        def computed(spent_s: float) -> None:
            if leg.backward:
                times.backward_s += spent_s
            else:
                times.forward_s += spent_s
            self._sums(rank, leg.sums, 0, gone_on)

        def gone_on() -> None:
            for each in leg.leaves:
                self._leaving[rank] += 1
                self._sum(each, rank, lambda: self._arrived(rank))
            self._leg(rank, number + 1)

        self._stretch(leg.flop, computed, rank)

    def _across(self, rank: int) -> None:
        begun_s = self._stage.now_s

        def updated(spent_s: float) -> None:
            times = self._times[rank]
            times.update_s = spent_s
            times.gradients_s = self._stage.now_s - begun_s - spent_s
            self._going -= 1
            if self._going == 0:
                self._done(self._times)

        self._leaving[rank] += 1
        self._last[rank] = lambda: self._stretch(self._floor.update_flop[rank], updated, rank)
        self._sums(rank, self._floor.across, 0, lambda: self._arrived(rank))

    def _arrived(self, rank: int) -> None:
        """A sum of gradients is there; after the last one the rank goes on."""
        self._leaving[rank] -= 1
        if self._leaving[rank] == 0 and rank in self._last:
            self._last.pop(rank)()

    def _stretch(self, work_flop: float, then: Callable[[float], None], rank: int) -> None:
        """Compute, and wait for the slowest; a timer, since processors are not shared, and thousands of them are cheap."""
        begin_s = self._stage.now_s + self._ahead_s
        spent_s = self._speeds.finish_s(self._floor.names[rank], work_flop=work_flop, begin_s=begin_s) - begin_s
        self._stage.after(spent_s * (1 + self._floor.waits), lambda: then(spent_s))

    def _sums(self, rank: int, sums: Sequence[FloorSum], number: int, then: Then) -> None:
        """Take part in sums, one after the other."""
        if number == len(sums):
            then()
        else:
            self._sum(sums[number], rank, lambda: self._sums(rank, sums, number + 1, then))

    def _sum(self, what: FloorSum, rank: int, then: Then) -> None:
        key, place = id(what), what.place_of[rank]
        if key not in self._replays:
            self._replays[key] = Replay(
                self._stage,
                what.schedule,
                hosts=what.ranks,
                element_bytes=what.planned.element_bytes,
                # What two ways on one connection cost each other was measured back and forth, and does not occur in a replica.
                software=self._alone if what.planned.kind.meets else self._software,
                done=lambda member: self._then.pop((key, member))(),
                skip=False,
                processors=what.processors,
            )
        self._then[key, place] = then
        self._replays[key].enter(place)
