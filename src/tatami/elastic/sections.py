"""The sections of a rank's work: how many it has passed, which one is open, and what becomes of that one at a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tatami.clock import Clock
from tatami.errors import TrainingError
from tatami.membership import Dismiss, Regroup


@dataclass(frozen=True, kw_only=True)
class OpenSection:
    """What is to be done about a section whose body is under way or complete.

    Attributes:
        commit: given the outcome; sends nothing, but for a step of a sharded optimizer.
        roll_back: forgets the body.
        admits: newcomers may begin here.
    """

    commit: Callable[[Any], None]
    roll_back: Callable[[], None]
    admits: bool


class Sections:
    """The sections of one rank; see `tatami.membership.events`.

    Attributes:
        passed: so many in all.
        outcome: what the last of them gave.
        is_half_done: whether its commit failed, as one that sends weights (with a sharded optimizer) may.
        open: the one that is open; None between two.
    """

    def __init__(self, name: str, *, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """As if nothing had been done yet."""
        self.passed = 0
        self.outcome: Any = None
        self.is_half_done = False
        self.open: OpenSection | None = None
        self._began_s: float | None = None
        self._changes = False

    @property
    def admits(self) -> bool:
        """Whether newcomers may begin where this rank is."""
        return self.open is None or self.open.admits

    def begin(self, section: OpenSection) -> None:
        """Its body begins."""
        self.open, self._changes = section, False
        self._began_s = self._clock.now_s()

    def begin_change(self, commit: Callable[[Any], None]) -> None:
        """The body of a change is complete: all that this rank is given by it is there, and nothing is replaced yet."""
        self.open, self._changes = OpenSection(commit=commit, roll_back=lambda: None, admits=True), True

    def commit(self, outcome: Any) -> None:
        """The point of the one that is open is passed."""
        section, self.open = self.open, None
        assert section is not None
        self.passed += 1
        self.outcome = outcome
        self.is_half_done = True
        section.commit(outcome)
        self.is_half_done = False
        self._began_s, self._changes = None, False

    def spent_s(self, until_s: float) -> float:
        """What has gone into the one that is open."""
        return 0.0 if self._began_s is None else until_s - self._began_s

    def settle(self, told: Regroup | Dismiss) -> str:
        """Finish or forget the one that is open, as all members do: "finished", "redone", or "none" where it is no step.

        Raises:
            TrainingError: this rank is not where the run takes it to be.
        """
        how = "none"
        if self._name in told.finish:
            how = "none" if self.open is None or self._changes else "finished"
            self.commit(told.outcome)
        elif self.open is not None:
            how = "none" if self._changes else "redone"
            section, self.open = self.open, None
            section.roll_back()
        self._changes = False
        if isinstance(told, Regroup) and self._name in told.newcomers:
            self.passed = told.sections
        if self.passed != told.sections:
            raise TrainingError(
                f"{self._name} has passed {self.passed} sections, and the run takes it that all have passed {told.sections}; "
                "this is an error of Tatami's"
            )
        return how
