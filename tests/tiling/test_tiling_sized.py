"""Planning with speeds that depend on the size of the tile."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, SpeedTable
from tatami.planning import compared
from tatami.sim.tiling import Floor
from tatami.tiling import AlphaBetaCost, at_equal_times, at_tiles, compare, plan, tile_flop, with_speeds
from tatami.workload import Workload

WORK = Workload.mlp(203, 800, 26, samples=4096)
FLOP = WORK.flop(width=1.0, height=1.0)
OUTGROWN = SpeedTable([(FLOP / 4, 2.0), (FLOP, 1.0)])
"""A quarter of the work takes an eighth of the time of a processor of speed 1, all of it as long."""


def test_areas_are_such_that_all_take_the_same_time() -> None:
    plain = at_equal_times(Cluster.from_speeds([1.0, OUTGROWN]), workload=WORK)
    # 1/8 + 7/6 (x - 1/4) = 1 - x at x = 7/13.
    assert list(plain.speeds.values()) == pytest.approx([1.0, 7 / 6])
    assert plain.sized == ()


def test_data_parallel_shares_and_their_price_follow_the_table() -> None:
    cluster = Cluster.from_speeds([1.0, OUTGROWN])
    found = plan("weighted", cluster=cluster, workload=WORK)
    assert [replica.width for replica in found.layout.replicas] == pytest.approx([6 / 13, 7 / 13], rel=1e-6)
    assert found.predicted.compute == pytest.approx(6 / 13 * FLOP / 1e9, rel=1e-3)
    assert list(at_tiles(cluster, found.layout, workload=WORK).speeds.values()) == pytest.approx([1.0, 7 / 6], rel=1e-3)
    assert sum(tile_flop(found.layout, workload=WORK).values()) == pytest.approx(FLOP)


def test_a_table_of_one_speed_is_that_speed() -> None:
    flat = SpeedTable([(1e3, 0.5), (1e9, 0.5)])
    by_table = plan(cluster=Cluster.from_speeds([1.0, flat, 0.25]), workload=WORK)
    by_number = plan(cluster=Cluster.from_speeds([1.0, 0.5, 0.25]), workload=WORK)
    assert by_table.tiling == by_number.tiling
    assert by_table.predicted_s == pytest.approx(by_number.predicted_s, rel=1e-9)


def test_planning_with_one_number_for_all_sizes_is_slower() -> None:
    cluster = Cluster.from_speeds([1.0, 1.0, OUTGROWN])
    taken = plan("timed", cluster=cluster, workload=WORK)
    for number in (1.0, 2.0):
        other = plan("timed", cluster=with_speeds(cluster, [1.0, 1.0, number]), workload=WORK)
        assert taken.predicted_s < AlphaBetaCost().price(other.layout, cluster=cluster, workload=WORK).total * 0.97


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_timed_is_never_worse_than_another_planner_and_never_below_the_bound(data: st.DataObject) -> None:
    shares = st.floats(0.02, 1.0)
    speeds: list[float] = []
    for _ in range(data.draw(st.integers(2, 5))):
        speed, slower = data.draw(st.floats(0.2, 4.0)), data.draw(st.floats(0.3, 1.0))
        knee = data.draw(shares) * FLOP / 4
        # Never faster than in proportion: small tiles slower (a GPU), or large ones (a cache).
        low = slower * speed if data.draw(st.booleans()) else speed
        speeds.append(SpeedTable([(knee, low), (4 * knee, speed if low < speed else slower * speed)]))
    cluster = Cluster.from_speeds(speeds)
    found = plan("timed", cluster=cluster, workload=WORK)
    for other in compare(["even", "srpm", "srpm-merged", "weighted"], cluster=cluster, workload=WORK):
        assert found.predicted_s <= other.predicted_s * (1 + 1e-9)
    assert found.predicted_s >= found.bound_s * (1 - 1e-9)


def test_planners_that_know_one_number_only_plan_with_speeds_at_which_all_take_as_long() -> None:
    cluster = Cluster.from_speeds([1.0, OUTGROWN])
    plain = at_equal_times(cluster, workload=WORK)
    found = {each.planner: each for each in compare(cluster=cluster, workload=WORK)}
    assert list(found) == ["even", "grid", "grid-rev", "srpm", "srpm-merged", "weighted", "timed"]
    for name in ("grid", "grid-rev"):
        assert found[name].layout == plan(name, cluster=plain, workload=WORK).layout
        here = at_tiles(cluster, found[name].layout, workload=WORK)  # priced at the speeds of its tiles
        assert found[name].predicted_s == AlphaBetaCost().price(found[name].layout, cluster=here, workload=WORK).total


def test_the_comparison_says_what_the_speeds_are() -> None:
    cluster = Cluster.from_speeds([1e9, OUTGROWN.scaled(speed=1e9)])
    text = str(compared(["timed"], cluster=cluster, workload=WORK))
    assert "speeds by the size of the tile, and under timed" in text
    assert "2 Gflop/s" in text
    assert "1.17 Gflop/s" in text or "1.16 Gflop/s" in text


def test_the_simulator_computes_at_the_speed_of_the_size() -> None:
    cluster = Cluster.from_speeds([1.0, OUTGROWN])
    layout = plan("weighted", cluster=cluster, workload=WORK).layout
    tiling, tilings = layout.cut(samples=WORK.samples, units=WORK.units), layout.cut_blocks(WORK)

    def flop(speeds: dict[str, float]) -> float:
        floor = Floor(tiling, tilings=tilings, workload=WORK, cluster=cluster, speeds=speeds)
        return sum(leg.flop for leg in floor.legs[1]) + floor.update_flop[1]

    plain = flop({"p0": 1.0, "p1": 1.0})
    assert flop({"p0": 1.0, "p1": OUTGROWN}) == pytest.approx(plain / (7 / 6), rel=1e-3)
