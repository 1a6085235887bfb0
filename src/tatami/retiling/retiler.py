"""When to look at the balance, and what is bad enough to act on: the settings of re-tiling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tatami.errors import PlanError
from tatami.tiling import DEFAULT_PLANNER, AbstractPlanner, SrpmPlanner, find_planner

Rule = Literal["notice", "settling", "published"]
RULES: tuple[Rule, ...] = ("notice", "settling", "published")
_DRPM: Mapping[str, float] = MappingProxyType(
    {"every": 20, "window": 6, "t_whole": 0.4, "t_line": 0.8, "min_gain": 0.05, "certainty": 3.0}
)
"""Settings of DRPM that are not given. The first four are the published ones."""


@dataclass(frozen=True, kw_only=True)
class Retiler:
    """Dynamic re-mapping: look at every iteration and move when it pays, or the DRPM of Ozawa, Sugaya and Aso, section 5.

    Attributes:
        every: R of DRPM; the balance is checked after every so many iterations.
        window: L; abilities are estimated from a processor's last so many iterations.
        t_whole: below this ratio of shortest to longest time the whole is re-mapped.
        t_line: below this one, and not below `t_whole`, the replicas are.
        planner: what lays out the whole again; a name in `tatami.tiling.PLANNERS`, or a planner of your own. The paper's is
            "srpm"; the default is the one of least predicted time.
        known_speeds: whether the run starts with speeds. Where it does not, DRPM's first check re-maps the whole. None: as the
            model was tiled.
        rule: "notice" (see `tatami.retiling.watching`), "settling" (see `tatami.retiling.settling`) or "published" (see
            `tatami.retiling.published`). None: "notice"; "settling" where one of its settings is given.
        min_gain: only for "settling": a re-mapping must be expected to shorten the longest compute time by this fraction.
        certainty: only for "settling": an imbalance must exceed the noise by so many standard errors. 0 takes every number
            for the truth.

    Raises:
        PlanError: an invalid setting; says which.
    """

    every: int = None  # type: ignore[assignment]  # filled in below, by what it stands for
    window: int = None  # type: ignore[assignment]
    t_whole: float = None  # type: ignore[assignment]
    t_line: float = None  # type: ignore[assignment]
    planner: str | AbstractPlanner = DEFAULT_PLANNER
    known_speeds: bool | None = None
    rule: Rule = None  # type: ignore[assignment]
    min_gain: float = None  # type: ignore[assignment]
    certainty: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        given = any(getattr(self, name) is not None for name in _DRPM)
        rule: str | None = self.rule
        if rule is None:
            object.__setattr__(self, "rule", "settling" if given else "notice")
        for name, usual in _DRPM.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        _check_count("every", self.every, least=1, why="the balance is checked after every so many iterations; 20 is usual")
        _check_count("window", self.window, least=2, why="a line needs two points; 6 is usual")
        if not 0 < self.t_whole <= self.t_line <= 1:
            raise PlanError(
                f"Retiler needs 0 < t_whole <= t_line <= 1, not t_whole={self.t_whole} and t_line={self.t_line}: both are "
                "ratios of shortest to longest time; 0.4 and 0.8 are usual"
            )
        if self.rule not in RULES:
            raise PlanError(f"there is no re-mapping rule {self.rule!r}; choose one of {', '.join(RULES)}")
        if not 0 < self.min_gain < 1:
            raise PlanError(f"Retiler.min_gain must be a fraction between 0 and 1, not {self.min_gain}; 0.05 is usual")
        if not (math.isfinite(self.certainty) and self.certainty >= 0):
            raise PlanError(f"Retiler.certainty must be a finite number >= 0 (of standard errors), not {self.certainty}")
        if isinstance(self.planner, str):
            find_planner(self.planner)

    @classmethod
    def published(cls, *, known_speeds: bool | None = None) -> Retiler:
        """The rule and the settings of the paper, to the letter."""
        return cls(rule="published", planner=SrpmPlanner.name, known_speeds=known_speeds)

    @property
    def watches(self) -> bool:
        """Whether every iteration is looked at."""
        return self.rule == "notice"

    @property
    def knows_stages(self) -> bool:
        """Whether pipeline stages are laid out again: every iteration is looked at, and the least predicted time decides."""
        return self.watches and self.planner == DEFAULT_PLANNER

    def due(self, iteration: int) -> bool:
        """Whether a check follows after this iteration (counted from 1)."""
        return self.watches or iteration % self.every == 0


def _check_count(name: str, value: int, *, least: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"Retiler.{name} must be a whole number >= {least}, not {value!r}: {why}")
