"""Speeds and balance from a few points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.retiling.ability import ability, balance, estimate


def test_the_slope_of_equal_iterations_is_work_over_time() -> None:
    assert ability([(0.5, 10.0)] * 6) == pytest.approx(20.0)


def test_the_slope_of_unequal_iterations_by_hand() -> None:
    # Points (1, 2), (2, 4), (4, 6): means 7/3 and 4; sum of products 6, of squares 42/9.
    assert ability([(1.0, 2.0), (1.0, 2.0), (2.0, 2.0)]) == pytest.approx(6 / (42 / 9))


def test_one_point_falls_back_to_its_mean() -> None:
    assert ability([(2.0, 10.0)]) == 5.0


def test_a_slope_that_is_not_positive_falls_back_to_the_mean() -> None:
    assert ability([(2.0, 8.0), (0.0, 2.0), (0.0, 0.0)]) == 5.0


@pytest.mark.parametrize("points", [[], [(0.0, 5.0)] * 3, [(1.0, 0.0)] * 3])
def test_no_time_or_no_work_says_nothing(points: list[tuple[float, float]]) -> None:
    assert ability(points) is None


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), max_size=8))
def test_an_ability_is_always_positive_and_finite(points: list[tuple[float, float]]) -> None:
    speed = ability(points)
    assert speed is None or (math.isfinite(speed) and speed > 0)


def test_who_was_not_measured_keeps_its_last_estimate_or_its_given_speed_on_the_same_scale() -> None:
    points = {"a": [(1.0, 100.0)] * 2, "b": [(1.0, 300.0)] * 2}
    given = {"a": 1.0, "b": 3.0, "c": 0.5, "d": 2.0}
    assert estimate(points, last={"d": 40.0}, given=given) == pytest.approx({"a": 100, "b": 300, "c": 50, "d": 40})


def test_balance_compares_mean_times_and_knows_its_error() -> None:
    seen = balance({"a": [(1.0, 1.0)] * 4, "b": [(1.5, 1.0), (2.5, 1.0)] * 2, "idle": [(0.0, 0.0)]})
    assert seen is not None
    assert (seen.ratio, seen.fastest, seen.slowest) == (0.5, "a", "b")
    # b: variance (4 x 0.25 / 3) / 4 = 1/12; pooled with a's 0 over 6 degrees of freedom 1/24; both over 4 points.
    assert seen.error == pytest.approx(math.sqrt((1 / 12 + 1 / 24) / 4))


def test_no_times_no_balance() -> None:
    assert balance({"a": [(0.0, 1.0)], "b": []}) is None
