"""When machines die and come back: the same for a run that is repaired and one that is restarted, as far as both last."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

from tatami.cluster import Processor
from tatami.sim.elastic.elastic_setup import LossySetup
from tatami.sim.server.lifetimes import life_s


@dataclass(frozen=True, kw_only=True)
class MachineEvent:
    """A machine dies, or joins.

    Attributes:
        at_s: when.
        dies: or joins.
        processor: of the machine; where one comes back its name is a new one, since to the others it is a new rank.
    """

    at_s: float
    dies: bool
    processor: Processor


class MachineEvents:
    """What happens to the machines, in the order of time.

    Args:
        setup: how long they live, and are away.
        seed: of the lives.
    """

    def __init__(self, setup: LossySetup, *, seed: int) -> None:
        self._setup = setup
        self._seed = seed
        self._heap: list[tuple[float, int, bool, int]] = []
        self._generation = [0] * setup.cluster.size
        self._alive = [True] * setup.cluster.size
        for number in range(setup.cluster.size):
            self._live(number, from_s=0.0)
        for at_s, number in setup.deaths:
            heapq.heappush(self._heap, (at_s, number, True, -1))
        self._drop_void()

    @property
    def next_s(self) -> float:
        """When something happens next; infinity for never."""
        return self._heap[0][0] if self._heap else math.inf

    def first(self) -> dict[str, Processor]:
        """The machines at the beginning, by name."""
        return {processor.name: processor for processor in self._setup.cluster.processors}

    def take(self) -> MachineEvent:
        """What happens next."""
        at_s, number, dies, _ = heapq.heappop(self._heap)
        if dies:
            self._alive[number] = False
            event = MachineEvent(at_s=at_s, dies=True, processor=self._processor(number))
            if self._setup.back_s is not None:
                heapq.heappush(self._heap, (at_s + self._setup.back_s, number, False, 0))
        else:
            self._alive[number] = True
            self._generation[number] += 1
            event = MachineEvent(at_s=at_s, dies=False, processor=self._processor(number))
            self._live(number, from_s=at_s)
        self._drop_void()
        return event

    def _live(self, number: int, *, from_s: float) -> None:
        if self._setup.mtbf_s is not None:
            generation = self._generation[number]
            lasts_s = life_s(self._setup.mtbf_s, seed=self._seed, kind="machine", number=number, generation=generation)
            heapq.heappush(self._heap, (from_s + lasts_s, number, True, generation))

    def _drop_void(self) -> None:
        """Deaths of those that are dead by now do not happen."""
        while self._heap:
            _, number, dies, generation = self._heap[0]
            if not dies or (self._alive[number] and generation in (-1, self._generation[number])):
                return
            heapq.heappop(self._heap)

    def _processor(self, number: int) -> Processor:
        processor, generation = self._setup.cluster.processors[number], self._generation[number]
        return replace(processor, name=f"{processor.name}+{generation}") if generation else processor
