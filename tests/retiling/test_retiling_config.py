"""Settings that cannot be are refused, with what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from tatami.errors import PlanError
from tatami.retiling import Retiler, Timing


def test_the_defaults_are_the_published_ones() -> None:
    retiler = Retiler(rule="settling")
    assert (retiler.every, retiler.window, retiler.t_whole, retiler.t_line) == (20, 6, 0.4, 0.8)
    assert (retiler.planner, retiler.rule) == ("timed", "settling")
    assert Retiler.published() == Retiler(rule="published", planner="srpm")
    assert [iteration for iteration in range(1, 61) if retiler.due(iteration)] == [20, 40, 60]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"every": 0}, r"every must be a whole number >= 1, not 0"),
        ({"every": 2.5}, r"every must be a whole number >= 1, not 2.5"),
        ({"window": 1}, r"window must be a whole number >= 2, not 1: a line needs two points"),
        ({"t_whole": 0.0}, r"0 < t_whole <= t_line <= 1, not t_whole=0.0"),
        ({"t_whole": 0.9}, r"t_whole=0.9 and t_line=0.8"),
        ({"t_line": 1.1}, r"t_line=1.1"),
        ({"t_line": float("nan")}, r"t_line=nan"),
        ({"planner": "srmp"}, r"no planner 'srmp'; choose one of .*srpm"),
        ({"rule": "sharp"}, r"no re-mapping rule 'sharp'; choose one of notice, settling, published"),
        ({"min_gain": 0.0}, r"min_gain must be a fraction between 0 and 1, not 0.0"),
        ({"certainty": -1.0}, r"certainty must be a finite number >= 0"),
        ({"certainty": float("inf")}, r"certainty must be a finite number >= 0"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Retiler(**settings)


@pytest.mark.parametrize(
    ("name", "value"), [("t1_s", -1.0), ("t2_s", float("nan")), ("compute_s", float("inf")), ("work", -2.0)]
)
def test_a_timing_that_no_clock_gives_is_refused(name: str, value: float) -> None:
    good = {"t1_s": 1.0, "t2_s": 1.0, "compute_s": 1.0, "work": 1.0}
    with pytest.raises(PlanError, match=rf"timing of p0 in iteration 7: {name} must be a finite number >= 0, not {value}"):
        Timing(processor="p0", iteration=7, **{**good, name: value})
