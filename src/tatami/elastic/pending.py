"""The change of the members that is being made, as the report will tell of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tatami.elastic.orders import CarriedOut
from tatami.membership import Regroup
from tatami.report.elastic_run import MemberChange
from tatami.tiling import Layout, StagedLayout


@dataclass(kw_only=True)
class PendingChange:
    """What is known of it so far.

    Attributes:
        noticed_s: when the reason for it was noticed, since the start of the run.
        halted_s: so long after that, all members had stopped.
        change: what they were then told to do, the last time: a death in the middle of a change brings another one.
        reasons: of all of them.
        spent_s: what the member that lost most had spent on work that is done again.
        steps_lost: the most that any member went back.
        settled: what became of the step that was open; see `MemberChange`.
        step: where the members go on.
    """

    noticed_s: float
    halted_s: float = 0.0
    change: Regroup | None = None
    reasons: list[str] = field(default_factory=list)
    spent_s: float = 0.0
    steps_lost: int = 0
    settled: str = "none"
    step: int = 0

    def regroup(self, change: Regroup, *, now_s: float) -> None:
        """All have stopped, and are told what to do."""
        self.change, self.halted_s = change, now_s - self.noticed_s
        self.reasons.append(change.reason)

    def carried_out(self, done: CarriedOut) -> None:
        """A member has done its part of it, or of another change, which is none of this one's."""
        if self.change is None or self.change.ticket != done.ticket:
            return
        self.spent_s = max(self.spent_s, done.spent_s)
        self.step = done.step
        self.steps_lost = max(self.steps_lost, done.steps_lost)
        if done.settled != "none" and self.settled != "finished":
            self.settled = done.settled

    def made(self, *, now_s: float, tiling: dict[str, Any] | None) -> MemberChange:
        """All have done their part."""
        assert self.change is not None
        laid_s = now_s - self.noticed_s - self.halted_s
        return MemberChange(
            at_s=self.noticed_s,
            reason=", ".join(self.reasons),
            step=self.step,
            settled=self.settled,
            steps_lost=self.steps_lost,
            members=self.change.members,
            halted_s=self.halted_s,
            laid_s=laid_s,
            lost_s=self.spent_s + self.halted_s + laid_s,
            moved_units=sum(take.units.size for take in self.change.takes if take.source != take.dest),
            tiling=tiling,
            stages=_stages_of(self.change.layout),
        )


def _stages_of(layout: Layout | StagedLayout) -> tuple[tuple[str, ...], ...]:
    return tuple(stage.processors for stage in layout.stages) if isinstance(layout, StagedLayout) else ()
