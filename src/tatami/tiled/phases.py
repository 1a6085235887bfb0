"""Where the time of an iteration goes: compute 1, vertical, compute 2, horizontal, compute 3.

The tiled layers say when a phase begins; no other code has to. So a hand-written loop is measured like the Trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from tatami.clock import NO_PACE, Clock, Pace, SystemClock


class IterationPhase(Enum):
    """What a rank is doing. The names in brackets are those of the DRPM paper."""

    OUTSIDE = "outside"
    FORWARD = "forward"  # compute 1, and the loss
    VERTICAL = "vertical"  # comm 1: waiting for the column included
    BACKWARD = "backward"  # compute 2
    HORIZONTAL = "horizontal"  # comm 2: waiting for the other columns included
    UPDATE = "update"  # compute 3: clipping and the optimizer's step


_COMPUTE = (IterationPhase.FORWARD, IterationPhase.BACKWARD, IterationPhase.UPDATE)


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Seconds that one iteration spent in each phase."""

    forward_s: float
    vertical_s: float
    backward_s: float
    horizontal_s: float
    update_s: float

    @property
    def t1_s(self) -> float:
        """The paper's t1: compute 1 + comm 1 + compute 2. Contains the wait for the slowest of the column."""
        return self.forward_s + self.vertical_s + self.backward_s

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
        return self.compute_s + self.vertical_s + self.horizontal_s


class Phases:
    """The stopwatch of one rank. `enter` ends the phase that was running and begins another.

    Args:
        clock: where the time comes from.
        pace: told when a stretch of compute begins and ends, inside its time (see `tatami.clock.Pace`); waits are not compute.
    """

    def __init__(self, *, clock: Clock | None = None, pace: Pace = NO_PACE) -> None:
        self.clock = clock or SystemClock()
        self.pace = pace
        self.current = IterationPhase.OUTSIDE
        self._since_s = self.clock.now_s()
        self._spent_s = dict.fromkeys(IterationPhase, 0.0)
        self.last: PhaseTimes | None = None
        """Of the iteration that ended last."""
        self.computed_s = 0.0
        """Local compute since the beginning, up to the phase that is running."""

    def enter(self, phase: IterationPhase) -> None:
        """End the running phase and begin `phase`."""
        if self.current in _COMPUTE:
            self.pace.end()
        now_s = self.clock.now_s()
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
        self.enter(resume)

    def finish_iteration(self) -> PhaseTimes:
        """End the iteration; the next one begins with the next forward pass. Returns where its time went."""
        self.enter(IterationPhase.OUTSIDE)
        spent_s = self._spent_s
        self._spent_s = dict.fromkeys(IterationPhase, 0.0)
        self.last = PhaseTimes(
            forward_s=spent_s[IterationPhase.FORWARD],
            vertical_s=spent_s[IterationPhase.VERTICAL],
            backward_s=spent_s[IterationPhase.BACKWARD],
            horizontal_s=spent_s[IterationPhase.HORIZONTAL],
            update_s=spent_s[IterationPhase.UPDATE],
        )
        return self.last
