"""One iteration where no transfer shares a link: each rank's times in one pass, without events.

The times are those of `Iteration`. What a rank computes follows from when it begins, and a sum from when all its ranks come to
it. So legs are gone through one after the other, the computing of each and the sums over columns, and at last the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tatami.cluster import Link
from tatami.sim.allreduce import Software
from tatami.sim.tiling.changes import Speeds
from tatami.sim.tiling.floor import Floor, FloorSum
from tatami.sim.tiling.iteration import Times


class UnsharedIteration:
    """All ranks' times of one iteration.

    Args:
        floor: who computes and sends what; `is_plain` of it must hold.
        speeds: of the processors.
        begin_s: the stage's time at which each rank begins.
        ahead_s: what the run's time is ahead of the stage's.
        software: what ranks add to the wires; `is_plain` of it must hold.
        link: that each transfer has to itself.

    Attributes:
        times: of each rank, on the stage's clock.
        bytes_moved: by all sums.
    """

    def __init__(
        self,
        floor: Floor,
        *,
        speeds: Speeds,
        begin_s: Mapping[int, float],
        ahead_s: float,
        software: Software,
        link: Link,
    ) -> None:
        self._floor = floor
        self._speeds = speeds
        self._ahead_s = ahead_s
        self._software = software
        self._link = link
        self._now_s = dict(begin_s)
        self.times = {rank: Times(began_s=at_s) for rank, at_s in begin_s.items()}
        self.bytes_moved = 0.0
        self._go()

    def _go(self) -> None:
        leaving = self._legs()
        for rank, times in self.times.items():
            times.vertical_s = self._now_s[rank] - times.began_s - times.compute_s
        backward_s = dict(self._now_s)
        there = [self._done_s(each, begin_s) for each, begin_s in leaving]
        for each in self._floor.across:
            self._now_s.update(self._done_s(each, self._now_s))
        for rank, times in self.times.items():
            gradients_s = max(self._now_s[rank], *(done_s[rank] for done_s in there if rank in done_s), backward_s[rank])
            times.update_s = self._spent_s(rank, self._floor.update_flop[rank], gradients_s)
            times.horizontal_s = gradients_s - backward_s[rank] + times.update_s * self._floor.waits

    def _legs(self) -> list[tuple[FloorSum, dict[int, float]]]:
        """Forward and backward pass; the sums of gradients that leave meanwhile, and when each rank comes to them."""
        leaving: dict[int, tuple[FloorSum, dict[int, float]]] = {}
        for number in range(max((len(legs) for legs in self._floor.legs.values()), default=0)):
            legs = {rank: legs[number] for rank, legs in self._floor.legs.items() if number < len(legs)}
            for rank, leg in legs.items():
                spent_s = self._spent_s(rank, leg.flop, self._now_s[rank])
                self._now_s[rank] += spent_s * (1 + self._floor.waits)
                if leg.backward:
                    self.times[rank].backward_s += spent_s
                else:
                    self.times[rank].forward_s += spent_s
            for each in _each_once(sum_ for leg in legs.values() for sum_ in leg.sums):
                self._now_s.update(self._done_s(each, self._now_s))
            for rank, leg in legs.items():
                for each in leg.leaves:
                    leaving.setdefault(id(each), (each, {}))[1][rank] = self._now_s[rank]
        return list(leaving.values())

    def _spent_s(self, rank: int, work_flop: float, at_s: float) -> float:
        begin_s = at_s + self._ahead_s
        return self._speeds.finish_s(self._floor.names[rank], work_flop=work_flop, begin_s=begin_s) - begin_s

    def _done_s(self, what: FloorSum, begin_s: Mapping[int, float]) -> dict[int, float]:
        """When each rank that comes to a sum has it. One that never does sends nothing in it."""
        rounds = what.rounds
        assert rounds is not None
        self.bytes_moved += rounds.size_bytes
        begun_s = np.array([begin_s.get(rank, 0.0) for rank in what.ranks])
        done_s = rounds.done_s(begun_s, link=self._link, software=self._software, processors=what.processors)
        return {rank: at_s for rank, at_s in zip(what.ranks, done_s.tolist(), strict=True) if rank in begin_s}


def _each_once(sums: Iterable[FloorSum]) -> list[FloorSum]:
    """In the order in which ranks come to them: those of a column are in the same one on each of its ranks."""
    return list({id(each): each for each in sums}.values())
