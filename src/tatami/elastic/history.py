"""What has happened to the members of a run since its first step began, and the change that is being made, for the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tatami.elastic.orders import CarriedOut
from tatami.engine.silence import RunClock
from tatami.membership import Regroup
from tatami.membership.state import THE_RUN_BEGINS
from tatami.report.elastic_run import ElasticReport, MemberChange
from tatami.tiling import StagedLayout


class RunHistory:
    """The history of one run.

    Args:
        tell: given each change of the members when it is done; not their first formation.

    Attributes:
        pending: the change that is being made; None where there is none.
        changes: those that are done.
        not_joined: see `ElasticReport`.
    """

    def __init__(self, clock: RunClock, *, tell: Callable[[MemberChange], None]) -> None:
        self.pending: PendingChange | None = None
        self.changes: list[MemberChange] = []
        self.not_joined: dict[str, str] = {}
        self._clock = clock
        self._tell = tell
        self._first_tiling: dict[str, Any] | None = None
        self._first_members: tuple[str, ...] | None = None

    def notice(self) -> PendingChange:
        """There is a reason for a change; the first one counts."""
        self.pending = self.pending or PendingChange(noticed_s=self._clock.now_s())
        return self.pending

    def regroup(self, change: Regroup) -> None:
        """All members have stopped, and are told what to do."""
        self.notice().regroup(change, now_s=self._clock.now_s())

    def done(self, pending: PendingChange, *, tiling: dict[str, Any] | None) -> None:
        """All have done their part of it."""
        assert pending.change is not None
        if self._first_members is None:
            self._first_tiling, self._first_members = tiling, pending.change.members
            made = pending.made(now_s=self._clock.now_s(), tiling=tiling)
            self._clock.first_step()
            if pending.change.reason != THE_RUN_BEGINS:  # a rank is gone that never came to the first step
                self._add(replace(made, at_s=0.0, halted_s=0.0, laid_s=0.0, lost_s=0.0))
            return
        self._add(pending.made(now_s=self._clock.now_s(), tiling=tiling))

    def _add(self, change: MemberChange) -> None:
        self.changes.append(change)
        self._tell(change)

    def report(self, *, settings: Mapping[str, Any]) -> ElasticReport:
        """The report of what has happened so far."""
        return ElasticReport(
            startup_s=self._clock.startup_s,
            total_s=self._clock.now_s(),
            changes=tuple(self.changes),
            first_tiling=self._first_tiling,
            first_members=self._first_members or (),
            settings=settings,
            not_joined=dict(self.not_joined),
        )


@dataclass(kw_only=True)
class PendingChange:
    """What is known of it so far.

    Attributes:
        noticed_s: when the reason for it was noticed, since the start of the run.
        halted_s: so long after that, all members had stopped.
        change: the last order that they were given: a death in the middle of a change brings another one.
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
        """All have stopped, and get their order."""
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
        layout = self.change.layout
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
            stages=tuple(each.processors for each in layout.stages) if isinstance(layout, StagedLayout) else (),
        )
