"""A column re-mapping keeps everything but the cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.retiling.columns import forecast, recut
from tatami.tiling import Column, Layout
from tatami.workload import Block, Workload

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


def test_forecast_knows_that_the_slowest_of_every_block_counts() -> None:
    heads = Block(units=2, unit_parameters=1, forward_elements=1, flop_per_unit=30.0)
    hidden = Block(units=60, unit_parameters=1, forward_elements=1, flop_per_unit=1.0)
    layout = Layout(columns=(Column(width=1.0, processors=("a", "b"), heights=(0.75, 0.25)),))
    speeds = {"a": 3.0, "b": 1.0}
    fine = forecast(layout, workload=Workload(samples=10, blocks=(hidden, hidden)), speeds=speeds)
    coarse = forecast(layout, workload=Workload(samples=10, blocks=(heads, hidden)), speeds=speeds)
    assert (fine.ratio, fine.slowest) == pytest.approx((1.0, 10 * 2 * 15))
    # a has both heads and waits for nobody there; b has none, and 15 hidden units.
    assert coarse.slowest == pytest.approx(10 * (60 / 3 + 15))
    assert coarse.ratio == pytest.approx(15 / (20 + 15))


def test_a_network_without_blocks_keeps_its_columns() -> None:
    layout = Layout(columns=tuple(Column(width=0.5, processors=(name,), heights=(1.0,)) for name in "ab"))
    workload = Workload(samples=10, replicated_flop_per_sample=3)
    assert recut(layout, speeds={"a": 1.0, "b": 5.0}, units=workload.units) == layout
    seen = forecast(layout, workload=workload, speeds={"a": 1.0, "b": 5.0})
    assert (seen.ratio, seen.slowest) == pytest.approx((0.2, 5 * 3))


def test_forecast_is_area_over_speed() -> None:
    workload = Workload.mlp(3, 10, 2, samples=100)
    seen = forecast(LAYOUT, workload=workload, speeds={"a": 50, "b": 75, "c": 125, "d": 375, "e": 750})
    slower = forecast(LAYOUT, workload=workload, speeds={"a": 10, "b": 75, "c": 125, "d": 375, "e": 750})
    assert (seen.ratio, slower.ratio) == pytest.approx((0.5, 0.1))
    assert slower.slowest / seen.slowest == pytest.approx(5)
