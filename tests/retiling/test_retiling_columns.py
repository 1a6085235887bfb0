"""A column re-mapping keeps everything but the cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.retiling.columns import forecast, recut
from tatami.tiling import Column, Layout

LAYOUT = Layout(
    columns=(
        Column(width=0.25, processors=("a", "b", "c"), heights=(0.2, 0.3, 0.5)),
        Column(width=0.75, processors=("d", "e"), heights=(0.5, 0.5)),
    )
)


def test_heights_follow_the_speeds_of_the_column() -> None:
    new = recut(LAYOUT, speeds={"a": 1, "b": 1, "c": 2, "d": 30, "e": 10}, units=80)
    assert [column.width for column in new.columns] == [0.25, 0.75]
    assert [column.processors for column in new.columns] == [("a", "b", "c"), ("d", "e")]
    assert [column.heights for column in new.columns] == [(0.25, 0.25, 0.5), (0.75, 0.25)]


@given(speeds=st.lists(st.floats(1e-6, 1e6), min_size=5, max_size=5), units=st.integers(3, 100))
def test_nobody_is_left_without_a_unit(speeds: list[float], units: int) -> None:
    new = recut(LAYOUT, speeds=dict(zip("abcde", speeds, strict=True)), units=units)
    assert all(tile.units.size >= 1 for tile in new.cut(samples=100, units=units).tiles)


def test_forecast_is_area_over_speed() -> None:
    tiling = LAYOUT.cut(samples=100, units=10)
    seen = forecast(tiling, speeds={"a": 50, "b": 75, "c": 125, "d": 375, "e": 750})
    assert (seen.ratio, seen.slowest_s) == pytest.approx((0.5, 1.0))
