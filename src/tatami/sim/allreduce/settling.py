"""Rounds that repeat themselves: when every rank takes as long for a round as for the one before, the rest is known.

Let x(r) be when each rank was done with round r. In a phase whose rounds are alike, and in which all ranks are, x(r + 1)
follows from x(r) alone, and shifting x(r) by a time shifts x(r + 1) by the same. So once x(r) = x(r - 1) + d for all ranks,
it is so forever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

CHECKS = (3, 7, 14, 28, 56, 112, 224, 448, 896)
"""Rounds after which the leads are compared: all ranks wait there for the last, and go on with the leads they had."""
_TOGETHER = 1e-7
"""Tolerance, as a fraction of a round: parts that differ by an element count as equal."""
_LEAST_S = 2e-9
"""The stage tells no times apart that are nearer than 1e-9 s."""


class Settling:
    """One phase: who was done with which round when."""

    def __init__(self, *, ranks: int, rounds: int) -> None:
        self._ranks = ranks
        self._rounds = rounds
        self._ends: dict[int, dict[int, float]] = defaultdict(dict)

    def note(self, rank: int, round_: int, now_s: float) -> bool:
        """`rank` is done with a round. True: it has to wait there."""
        done = round_ + 1
        if any(check - 3 < done <= check for check in CHECKS):
            self._ends[done][rank] = now_s
        return done in CHECKS and done < self._rounds

    def complete(self, round_: int) -> bool:
        """Whether all have come."""
        return len(self._ends[round_ + 1]) == self._ranks

    def ends(self, round_: int) -> dict[int, float]:
        return self._ends[round_ + 1]

    def period_s(self, round_: int) -> float | None:
        """How long each further round takes, the same for all ranks; None while it differs."""
        last, before = list(self._steps(round_ + 1)), list(self._steps(round_))
        steps = last + before
        if len(steps) < 2 * self._ranks:
            return None
        slack_s = max(_LEAST_S, _TOGETHER * max(steps))
        return sum(last) / len(last) if max(steps) - min(steps) <= slack_s else None

    def _steps(self, done: int) -> Iterator[float]:
        before = self._ends[done - 1]
        for rank, end_s in self._ends[done].items():
            if rank in before:
                yield end_s - before[rank]
