"""The result of a rehearsed run that lost and gained machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossyRun:
    """Where its time went.

    Attributes:
        seed: of the lives.
        total_s: until the last step was done, or the run ended.
        steps: that were done, and stayed done.
        useful_s: of these steps, each with the machines that did it.
        redone_s: of work that was thrown away.
        stopped_s: in which all had stopped, or started again.
        moved_s: in which rows moved.
        saved_s: in which all waited for a checkpoint.
        deaths: of machines that the run had, or that waited to be let in.
        joins: of machines that came back.
        ended: why the run could not go on; None where it did all its steps.
    """

    seed: int
    total_s: float
    steps: int
    useful_s: float
    redone_s: float = 0.0
    stopped_s: float = 0.0
    moved_s: float = 0.0
    saved_s: float = 0.0
    deaths: int = 0
    joins: int = 0
    ended: str | None = None

    @property
    def lost_s(self) -> float:
        """What is not of steps that stayed done."""
        return self.total_s - self.useful_s

    @property
    def lost_fraction(self) -> float:
        """Of the whole time; 0 of a run without any."""
        return self.lost_s / self.total_s if self.total_s else 0.0
