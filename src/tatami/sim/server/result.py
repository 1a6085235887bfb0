"""The results of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["worker", "server", "link"]


@dataclass(frozen=True, kw_only=True)
class Period:
    """What repeats: so many rounds, with the checkpoint after them, as a simulation of it has shown.

    Attributes:
        duration_s: from the opening of its first round to that of the next period's.
    """

    rounds: int
    duration_s: float
    bytes_moved: float

    @property
    def round_s(self) -> float:
        """Seconds of one round, with its part of the checkpoint."""
        return self.duration_s / self.rounds


@dataclass(frozen=True, kw_only=True)
class SimulatedFailure:
    """Something that broke, at a time after the start; `number` is that of the worker, server, or worker whose link it is."""

    at_s: float
    kind: Kind
    number: int
    round: int


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    """One simulated run.

    Attributes:
        recovery: the policy's name.
        seed: of the failures.
        rounds: that were applied.
        total_s: simulated seconds.
        undisturbed_s: of the same run without a failure.
        failures: in their order.
        lost_updates: updates of single workers that are missing in the rounds that were applied.
        bytes_moved: over the network.
        stopped: why the run ended before its last round; None where it did not.
    """

    recovery: str
    seed: int
    rounds: int
    total_s: float
    undisturbed_s: float
    failures: tuple[SimulatedFailure, ...]
    lost_updates: int
    bytes_moved: float
    stopped: str | None = None

    @property
    def num_failures(self) -> int:
        return len(self.failures)

    @property
    def lost_per_failure_s(self) -> float | None:
        """Seconds that the run took longer, for each failure; None where there was none."""
        return (self.total_s - self.undisturbed_s) / self.num_failures if self.failures else None
