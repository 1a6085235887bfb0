"""Speeds that change while a run goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tatami.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Change:
    """From some time on a processor has `factor` times the speed that it began with: 0.5 is half.

    Attributes:
        processor: its name.
        factor: of its first speed, whatever changes came before.
        at_s: simulated seconds; or
        at_iteration: the first iteration, counted from 1, that begins with it.

    Raises:
        InputError: a factor that is not positive, or not exactly one of the two times.
    """

    processor: str
    factor: float
    at_s: float | None = None
    at_iteration: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise InputError(f"a change of {self.processor}'s speed needs a finite factor > 0, not {self.factor}")
        if (self.at_s is None) == (self.at_iteration is None):
            raise InputError(f"a change of {self.processor}'s speed is either at_s or at_iteration, one of them")
        if (self.at_s is not None and not self.at_s >= 0) or (self.at_iteration is not None and self.at_iteration < 1):
            raise InputError(f"a change of {self.processor}'s speed is at >= 0 s, or at iteration >= 1, not {self}")


class Speeds:
    """The speed of every processor at any time: `finish_s` says when work will be done.

    Args:
        flop_per_s: what each begins with, by name.
        changes: of some of them.
    """

    def __init__(self, flop_per_s: dict[str, float], *, changes: Iterable[Change]) -> None:
        self._first = flop_per_s
        self._now = dict(flop_per_s)
        listed = list(changes)
        self._timed = sorted(((c.at_s, c) for c in listed if c.at_s is not None), key=lambda each: each[0])
        self._counted = sorted(
            ((c.at_iteration, c) for c in listed if c.at_iteration is not None), key=lambda each: each[0], reverse=True
        )

    def begin(self, iteration: int) -> None:
        """The changes of an iteration take place."""
        while self._counted and self._counted[-1][0] <= iteration:
            _, change = self._counted.pop()
            self._now[change.processor] = self._first[change.processor] * change.factor

    def finish_s(self, processor: str, *, work_flop: float, begin_s: float) -> float:
        """When work that begins at a time is done, at the speeds from then on."""
        at_s, left = begin_s, work_flop
        speed = self._now[processor]
        for change_s, change in self._timed:
            if change.processor != processor:
                continue
            if change_s > at_s:
                if left <= (change_s - at_s) * speed:
                    break
                left -= (change_s - at_s) * speed
                at_s = change_s
            speed = self._first[processor] * change.factor
        return at_s + left / speed

    @property
    def next_iteration(self) -> float:
        """The next iteration that begins with a change; infinity where there is none."""
        return self._counted[-1][0] if self._counted else math.inf

    def next_s(self, after_s: float) -> float:
        """The first time after this one at which a speed changes; infinity where there is none."""
        return next((at_s for at_s, _ in self._timed if at_s > after_s), math.inf)
