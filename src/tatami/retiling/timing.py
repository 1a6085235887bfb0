"""What one processor measured in one iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tatami.errors import PlanError

PROBE_EVERY = 4
"""Iterations after which a rank that was left out looks how fast it is: three looks tell that it is itself again."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One processor, one iteration: compute 1 - comm 1 - compute 2 - comm 2 - compute 3 (Ozawa et al., section 5).

    Attributes:
        processor: its name in the cluster.
        iteration: counted like the iterations that the controller is asked about.
        t1_s: compute 1 (forward) + comm 1 (tensor-parallel sums) + compute 2 (backward). Contains the wait for the slowest of
            the replica.
        t2_s: compute 2 (backward).
        compute_s: all local compute of the iteration, every wait excluded.
        work: what was computed, in a unit that all processors share: `Workload.tile_work`, samples x units for one block.
    """

    processor: str
    iteration: int
    t1_s: float
    t2_s: float
    compute_s: float
    work: float

    def __post_init__(self) -> None:
        for name in ("t1_s", "t2_s", "compute_s", "work"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(
                    f"timing of {self.processor} in iteration {self.iteration}: {name} must be a finite number >= 0, "
                    f"not {value}; take it from a monotonic clock"
                )
