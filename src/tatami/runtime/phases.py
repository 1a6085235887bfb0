"""Where the time of an iteration goes: forward, tensor-parallel sums, backward, gradient sums, update, hand-overs.

The tiled layers say when a phase begins; no other code has to. So a hand-written loop is measured like the Trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from tatami.clock import NO_PACE, Clock, Pace, SystemClock
from tatami.runtime.stopwatch import AbstractStopwatch, HostStopwatch, stopwatch_of


class IterationPhase(Enum):
    """What a rank is doing. The names in brackets are those of the DRPM paper."""

    OUTSIDE = "outside"
    FORWARD = "forward"  # compute 1, and the loss
    TENSOR_PARALLEL = "tensor_parallel"  # comm 1: waiting for the replica included
    BACKWARD = "backward"  # compute 2
    GRADIENTS = "gradients"  # comm 2: waiting for the other replicas included
    UPDATE = "update"  # compute 3: clipping and the optimizer's step
    HANDOVER = "handover"  # waiting for a tensor of another pipeline stage that is on its way
    BUBBLE = "bubble"  # waiting for another pipeline stage, which has not sent its tensor yet

    __hash__ = object.__hash__  # that of Enum is a call of Python, and every step makes dozens


_MOST_MARKS = 4096
"""So many marks of a device's stopwatch are kept unread."""
_COMPUTE = (IterationPhase.FORWARD, IterationPhase.BACKWARD, IterationPhase.UPDATE)


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Seconds that one iteration spent in each phase."""

    forward_s: float
    tensor_parallel_s: float
    backward_s: float
    gradients_s: float
    update_s: float
    handover_s: float = 0.0
    bubble_s: float = 0.0

    @property
    def t1_s(self) -> float:
        """The paper's t1: compute 1 + comm 1 + compute 2. Contains the wait for the slowest of the replica."""
        return self.forward_s + self.tensor_parallel_s + self.backward_s

    @property
    def t2_s(self) -> float:
        """The paper's t2: compute 2."""
        return self.backward_s

    @property
    def compute_s(self) -> float:
        """Pure local compute, without any wait: what ability should be judged by."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tensor_parallel_s + self.gradients_s + self.handover_s + self.bubble_s


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """A stretch of one phase, in seconds since `Phases.trace` was called.

    Attributes:
        phase: what the rank did.
        micro_batch: for which micro-batch; the last one where the phase belongs to none.
        began_s, ended_s: when.
    """

    phase: IterationPhase
    micro_batch: int
    began_s: float
    ended_s: float


class Phases:
    """The stopwatch of one rank. `enter` ends the phase that was running and begins another.

    Args:
        clock: where the time comes from.
        pace: told when a stretch of compute begins and ends, inside its time (see `tatami.clock.Pace`); waits are not compute.
    """

    def __init__(self, *, clock: Clock | None = None, pace: Pace = NO_PACE) -> None:
        self.clock = clock or SystemClock()
        self.pace = pace
        self.stopwatch: AbstractStopwatch = HostStopwatch(self.clock)
        self.current = IterationPhase.OUTSIDE
        self._since_s = self.clock.now_s()
        self._spent_s = dict.fromkeys(IterationPhase, 0.0)
        self.last: PhaseTimes | None = None
        """Times of the iteration that ended last."""
        self.computed_s = 0.0
        """Local compute since the beginning, up to the phase that is running."""
        self.spans: list[PhaseSpan] = []
        """What the iteration that was traced last consists of."""
        self._micro_batch, self._traces, self._traced_from_s = 0, False, 0.0

    def trace(self) -> None:
        """Keep the spans of the next iteration, until it ends."""
        self.spans, self._traces, self._traced_from_s = [], True, self.clock.now_s()

    def work_on(self, micro_batch: int) -> None:
        """What follows is done for this micro-batch."""
        if self._traces and micro_batch != self._micro_batch and self.current is not IterationPhase.OUTSIDE:
            self.enter(self.current)
        self._micro_batch = micro_batch

    def enter(self, phase: IterationPhase) -> None:
        """End the running phase and begin `phase`."""
        if self.current in _COMPUTE:
            self.pace.end()
        now_s = self.clock.now_s()
        if self._traces and self.current is not IterationPhase.OUTSIDE:
            began_s, ended_s = (each_s - self._traced_from_s for each_s in (self._since_s, now_s))
            self.spans.append(PhaseSpan(phase=self.current, micro_batch=self._micro_batch, began_s=began_s, ended_s=ended_s))
        self._spent_s[self.current] += now_s - self._since_s
        if self.current in _COMPUTE:
            self.computed_s += now_s - self._since_s
        self.current = phase
        self._since_s = now_s
        if phase in _COMPUTE:
            self.pace.begin()

    @contextmanager
    def during(self, phase: IterationPhase) -> Iterator[None]:
        """`phase` for the length of a with-block, and then what ran before. Outside of iterations nothing is counted."""
        resume = self.current
        if resume is IterationPhase.OUTSIDE:
            yield
            return
        self.enter(phase)
        yield
        if self.current is phase:  # else the iteration has ended inside, as in elastic runs, and what follows is outside of it
            self.enter(resume)

    def finish_iteration(self) -> PhaseTimes:
        """End the iteration; the next one begins with the next forward pass. Returns where its time went."""
        self.enter(IterationPhase.OUTSIDE)
        return self._begin_next()

    def _begin_next(self) -> PhaseTimes:
        self._traces = False
        spent_s = {f"{phase.value}_s": own_s for phase, own_s in self._spent_s.items() if phase is not IterationPhase.OUTSIDE}
        self._spent_s = dict.fromkeys(IterationPhase, 0.0)
        self.last = PhaseTimes(**spent_s)
        return self.last


class DevicePhases(Phases):
    """The stopwatch of a rank whose work is done by a device, behind its back.

    `enter` leaves a mark in the order of the work. What lies between the marks is read when the iteration ends, or when
    `computed_s` is asked for.

    Args:
        stopwatch: of the device.
        clock, pace: as of `Phases`. Where there is a pace, the host waits for the device at the end of each stretch of compute,
            because a pace goes by the clock of the host.
    """

    def __init__(self, stopwatch: AbstractStopwatch, *, clock: Clock | None = None, pace: Pace = NO_PACE) -> None:
        self._marks: list[tuple[IterationPhase, Any]] = []
        super().__init__(clock=clock, pace=pace)
        self.stopwatch = stopwatch

    def enter(self, phase: IterationPhase) -> None:
        if self.current in _COMPUTE and self.pace is not NO_PACE:
            self.stopwatch.finish()
            self.pace.end()
        if len(self._marks) >= _MOST_MARKS:  # a loop written by hand does not say where its iterations end
            self._read()
        self._marks.append((phase, self.stopwatch.mark()))
        self.current = phase
        if phase in _COMPUTE:
            self.pace.begin()

    @property
    def computed_s(self) -> float:
        self._read()
        return self._computed_s

    @computed_s.setter
    def computed_s(self, computed_s: float) -> None:
        self._computed_s = computed_s

    def finish_iteration(self) -> PhaseTimes:
        self.enter(IterationPhase.OUTSIDE)
        self._read()
        return self._begin_next()

    def _read(self) -> None:
        """Wait for the last mark, and count what lies between the marks. The last one stays, for the phase that is running."""
        for (phase, began), (_, ended) in zip(self._marks[:-1], self._marks[1:], strict=True):
            spent_s = self.stopwatch.between_s(began, ended)
            self._spent_s[phase] += spent_s
            if phase in _COMPUTE:
                self._computed_s += spent_s
        del self._marks[:-1]


def phases_of(device: torch.device, *, clock: Clock | None = None, pace: Pace = NO_PACE) -> Phases:
    """The stopwatch of a rank that computes on `device`."""
    if device.type == "cpu":
        return Phases(clock=clock, pace=pace)
    return DevicePhases(stopwatch_of(device, clock or SystemClock()), clock=clock, pace=pace)
