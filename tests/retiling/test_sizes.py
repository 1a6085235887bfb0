"""Speed as a function of size, from the few sizes that re-tilings show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import SpeedTable, speed_at
from tatami.retiling.sizes import SizedTimes


def learned(*points: tuple[float, float], error: float = 0.01) -> SizedTimes:
    sizes = SizedTimes(2)
    for work, per_work_s in points:
        sizes.learn(0, work=work, per_work_s=per_work_s, error=error)
    return sizes


def test_nothing_is_known_at_first_and_then_of_one_processor_only() -> None:
    sizes = learned((100.0, 2.0))
    assert sizes.at(0, work=7.0) == 2.0
    assert sizes.at(1, work=7.0) is None
    assert sizes.speed(1, work=7.0, speed=3.0) == 3.0


def test_a_size_between_two_is_as_slow_as_the_larger_and_outside_it_is_flat() -> None:
    sizes = learned((100.0, 2.0), (300.0, 3.0))
    assert [sizes.at(0, work=work) for work in (50, 100, 200, 300, 900)] == pytest.approx([2.0, 2.0, 3.0, 3.0, 3.0])
    found = sizes.speed(0, work=200.0, speed=8.0)
    assert [speed_at(found, work) for work in (200, 100, 300)] == pytest.approx([8.0, 12.0, 8.0])
    # Where the larger is faster, time is a straight line: 200 s for 100, 300 s for 300.
    assert learned((100.0, 2.0), (300.0, 1.0)).at(0, work=200.0) == pytest.approx(1.25)


def test_a_time_that_is_expected_makes_no_point() -> None:
    assert learned((100.0, 2.0), (300.0, 2.05)).points(0) == ((100.0, 2.0),)
    assert learned((100.0, 2.0), (300.0, 2.4), error=0.1).points(0) == ((100.0, 2.0),)
    assert len(learned((100.0, 2.0), (300.0, 2.4)).points(0)) == 2


def test_what_is_measured_again_at_a_size_replaces_what_was_known_of_it() -> None:
    assert learned((100.0, 2.0), (300.0, 3.0), (105.0, 2.5)).points(0) == ((105.0, 2.5), (300.0, 3.0))


def test_a_slower_processor_is_slower_at_every_size() -> None:
    sizes = learned((100.0, 2.0), (300.0, 3.0))
    sizes.scale(0, 2.0)
    assert sizes.points(0) == ((100.0, 4.0), (300.0, 6.0))
    assert speed_at(sizes.speed(0, work=100.0, speed=3.0), 300.0) == pytest.approx(2.0)


def test_a_larger_tile_that_takes_less_time_makes_an_older_point_void() -> None:
    assert learned((100.0, 3.0), (200.0, 1.0)).points(0) == ((200.0, 1.0),)
    assert learned((200.0, 1.0), (100.0, 3.0)).points(0) == ((100.0, 3.0),)


def test_of_a_table_that_was_given_the_form_is_believed_and_the_height_is_measured() -> None:
    sizes = SizedTimes(1, given={0: SpeedTable([(100.0, 1.0), (300.0, 0.5)])})
    sizes.learn(0, work=100.0, per_work_s=4.0, error=0.01)
    assert sizes.points(0) == ((100.0, 4.0), (300.0, 8.0))
    sizes.learn(0, work=300.0, per_work_s=4.5, error=0.01)
    assert sizes.points(0) == ((100.0, 4.0), (300.0, 4.5))


@given(points=st.lists(st.tuples(st.floats(1.0, 1e6), st.floats(1e-6, 1.0)), min_size=1, max_size=20), work=st.floats(0.1, 1e7))
def test_there_are_few_points_in_order_and_no_time_is_beyond_them(points: list[tuple[float, float]], work: float) -> None:
    sizes = learned(*points)
    kept = sizes.points(0)
    assert len(kept) <= 6
    assert list(kept) == sorted(kept)
    times = [per_work_s for _, per_work_s in kept]
    found = sizes.at(0, work=work)
    assert found is not None
    assert min(times) * (1 - 1e-9) <= found <= max(times) * (1 + 1e-9)
    # The newest is always believed, to what is told apart.
    assert sizes.at(0, work=points[-1][0]) == pytest.approx(points[-1][1], rel=0.0301)


def test_after_an_alarm_the_height_is_measured_and_the_ratio_that_was_noticed_makes_no_curve() -> None:
    sizes = learned((100.0, 2.0))
    sizes.scale(0, 4.5)  # noticed after few samples; it is 4 times
    sizes.learn(0, work=30.0, per_work_s=8.0, error=0.01)
    assert sizes.points(0) == ((100.0, 8.0),)
    sizes.learn(0, work=300.0, per_work_s=12.0, error=0.01)
    assert sizes.points(0) == ((100.0, 8.0), (300.0, 12.0))
