"""Undisturbed rounds are all alike, so one of them is simulated, and the others are passed over."""

from __future__ import annotations

from tatami.server.recovery import Checkpoint
from tatami.sim.server.fates import Fates
from tatami.sim.server.result import Period
from tatami.sim.server.setup import ServerSetup


class Skipping:
    """Says how many rounds may be passed over; none where `period` is None."""

    def __init__(self, setup: ServerSetup, *, period: Period | None) -> None:
        # Writing in the background must be over before the next is due, or periods would not be alike.
        keeps_up = period is None or setup.checkpoints.waits or setup.checkpoints.local_s < period.duration_s
        usable = setup.consistency.lockstep and keeps_up and (setup.checkpoints.waits or not setup.checkpoints.store)
        self.period = period if usable else None

    def rounds(self, fates: Fates, *, left: int, now_s: float) -> int:
        """Whole periods of rounds before the next failure and the end of the run."""
        if self.period is None:
            return 0
        undisturbed = fates.undisturbed_rounds(self.period, now_s=now_s, most=left)
        return undisturbed - undisturbed % self.period.rounds


def rounds_of_period(setup: ServerSetup) -> int:
    """Rounds from one checkpoint to the next, 1 where there are none."""
    if isinstance(setup.recovery, Checkpoint):
        return setup.recovery.interval(write_s=None, round_s=None, workers=len(setup.workers))
    return 1
