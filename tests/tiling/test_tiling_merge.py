"""Removal of small groups: thin groups go, tiles stay."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.tiling import Column, Layout, plan, remove_small_groups
from tatami.workload import Workload


def two_columns(left: tuple[float, ...], right: tuple[float, ...]) -> Layout:
    return Layout(
        columns=tuple(
            Column(width=0.5, processors=tuple(f"{side}{row}" for row in range(len(heights))), heights=heights)
            for side, heights in (("l", left), ("r", right))
        )
    )


def cuts(layout: Layout) -> list[tuple[float, int]]:
    return sorted(
        (sum(column.heights[:row]), index)
        for index, column in enumerate(layout.columns)
        for row in range(1, len(column.heights))
    )


def test_two_close_cuts_meet_in_the_middle() -> None:
    merged = remove_small_groups(two_columns((0.5, 0.5), (0.45, 0.55)))
    assert merged.columns[0].heights == merged.columns[1].heights == pytest.approx((0.475, 0.525))
    assert len(merged.cut(samples=10, units=100).groups) == 2


def test_cuts_at_the_threshold_or_further_stay() -> None:
    layout = two_columns((0.5, 0.5), (0.4375, 0.5625))
    assert remove_small_groups(layout, threshold=0.0625) == layout
    assert remove_small_groups(layout, threshold=0.063) != layout


def test_a_thin_tile_does_not_disappear() -> None:
    merged = remove_small_groups(two_columns((0.48, 0.04, 0.48), (0.5, 0.5)))
    assert merged.columns[0].heights == pytest.approx((0.49, 0.03, 0.48))
    assert merged.columns[1].heights == pytest.approx((0.49, 0.51))


def test_a_threshold_that_is_no_fraction_is_refused() -> None:
    with pytest.raises(PlanError, match="not 6"):
        remove_small_groups(two_columns((0.5, 0.5), (0.5, 0.5)), threshold=6)


def test_srpm_merged_has_fewer_groups_than_srpm_and_nearly_its_areas() -> None:
    cluster = Cluster.from_speeds([0.63, 0.63, 0.63, 1.0, 0.63, 1.0, 1.0, 0.63])
    workload = Workload.mlp(203, 80, 26, samples=1024)
    before = plan("srpm", cluster=cluster, workload=workload)
    after = plan("srpm-merged", cluster=cluster, workload=workload)
    assert len(before.tiling.groups) > len(after.tiling.groups) == 4
    for name, tile in after.tiling.by_processor.items():
        assert tile.area == pytest.approx(before.tiling.by_processor[name].area, rel=0.25)


heights = st.lists(st.integers(1, 20), min_size=1, max_size=6).map(
    lambda shares: tuple(share / sum(shares) for share in shares)
)


@given(left=heights, right=heights, threshold=st.floats(0.0, 0.3))
def test_what_is_left_thin_has_one_column_on_both_sides(
    left: tuple[float, ...], right: tuple[float, ...], threshold: float
) -> None:
    layout = two_columns(left, right)
    merged = remove_small_groups(layout, threshold=threshold)
    assert merged.processors == layout.processors
    assert all(height > 1e-9 for column in merged.columns for height in column.heights)
    levels: list[tuple[float, set[int]]] = []
    for height, column in cuts(merged):
        if levels and height - levels[-1][0] < 1e-9:
            levels[-1][1].add(column)
        else:
            levels.append((height, {column}))
    for (lower, below), (upper, above) in pairwise(levels):
        assert upper - lower >= threshold - 1e-9 or below & above
