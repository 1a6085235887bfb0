"""What has happened to the members of a run since its first step began, as its report tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tatami.clock import Clock
from tatami.elastic.pending import PendingChange
from tatami.membership import Regroup
from tatami.membership.state import THE_RUN_BEGINS
from tatami.report.elastic_run import ElasticReport, MemberChange


class RunHistory:
    """The history of one run, which begins when this object is made.

    Args:
        clock: of the run's process.
        tell: given each change of the members when it is done; not their first formation.

    Attributes:
        pending: the change that is being made; None where there is none.
        changes: those that are done.
    """

    def __init__(self, clock: Clock, *, tell: Callable[[MemberChange], None]) -> None:
        self.pending: PendingChange | None = None
        self.changes: list[MemberChange] = []
        self._clock = clock
        self._tell = tell
        self._made_s = self._zero_s = clock.now_s()
        self._first_tiling: dict[str, Any] | None = None
        self._first_members: tuple[str, ...] | None = None

    @property
    def now_s(self) -> float:
        """Since the first step began; before that, since the run was made."""
        return self._clock.now_s() - self._zero_s

    def notice(self) -> PendingChange:
        """There is a reason for a change; the first one counts."""
        self.pending = self.pending or PendingChange(noticed_s=self.now_s)
        return self.pending

    def regroup(self, change: Regroup) -> None:
        """All members have stopped, and are told what to do."""
        self.notice().regroup(change, now_s=self.now_s)

    def done(self, pending: PendingChange, *, tiling: dict[str, Any] | None) -> None:
        """All have done their part of it."""
        assert pending.change is not None
        if self._first_members is None:
            self._first_tiling, self._first_members = tiling, pending.change.members
            made = pending.made(now_s=self.now_s, tiling=tiling)
            self._zero_s = self._clock.now_s()
            if pending.change.reason != THE_RUN_BEGINS:  # a rank is gone that never came to the first step
                self._add(replace(made, at_s=0.0, halted_s=0.0, laid_s=0.0, lost_s=0.0))
            return
        self._add(pending.made(now_s=self.now_s, tiling=tiling))

    def _add(self, change: MemberChange) -> None:
        self.changes.append(change)
        self._tell(change)

    def report(self, *, settings: Mapping[str, Any]) -> ElasticReport:
        """The report of what has happened so far."""
        return ElasticReport(
            startup_s=self._zero_s - self._made_s,
            total_s=self.now_s,
            changes=tuple(self.changes),
            first_tiling=self._first_tiling,
            first_members=self._first_members or (),
            settings=settings,
        )
