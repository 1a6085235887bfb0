"""The controller: thresholds, windows, who is left out, and that all ranks decide alike."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from retiling_rig import NETTALK, run

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.retiling import Controller, DecisionKind, Retiler, Timing
from tatami.retiling.ability import ability, balance, estimate
from tatami.retiling.replica_cuts import forecast, recut
from tatami.tiling import Layout, Replica, plan
from tatami.workload import Block, Workload

TWO = Layout(replicas=(Replica(width=1.0, processors=("p0", "p1"), heights=(0.5, 0.5)),))


def controller(retiler: Retiler, *, known: bool = True, layout: Layout = TWO, speeds: tuple[float, ...] = (1, 1)) -> Controller:
    return Controller(retiler, cluster=Cluster.from_speeds(speeds), workload=NETTALK, layout=layout, known_speeds=known)


def measured(iterations: range, *, t1: tuple[float, ...], t2: tuple[float, ...], compute: tuple[float, ...]) -> list[Timing]:
    """p0, p1, ... with the same times in every iteration and equal work."""
    return [
        Timing(processor=f"p{index}", iteration=iteration, t1_s=t1[index], t2_s=t2[index], compute_s=own, work=40960.0)
        for iteration in iterations
        for index, own in enumerate(compute)
    ]


@pytest.mark.parametrize(
    ("t1", "kind", "told"),
    [
        (0.39, DecisionKind.WHOLE, "t1 min/max 0.39 < 0.40: re-map whole"),
        (0.41, DecisionKind.REPLICAS, "t1 min/max 0.41 < 0.80: re-map replicas"),
        (0.79, DecisionKind.REPLICAS, "t1 min/max 0.79 < 0.80: re-map replicas"),
        (0.81, DecisionKind.KEEP, "t1 min/max 0.81 >= 0.80: keep"),
    ],
)
def test_the_published_thresholds(t1: float, kind: DecisionKind, told: str) -> None:
    found = controller(Retiler.published()).observe(20, measured(range(1, 21), t1=(t1, 1), t2=(1, 1), compute=(1, 1)))
    assert found.kind is kind
    assert found.ratio == pytest.approx(t1)
    assert str(found).startswith(f"check 1 (iteration 20): {told}")


def test_the_published_rule_takes_t2_for_the_whole_and_t1_for_the_replicas() -> None:
    whole = controller(Retiler.published()).observe(20, measured(range(1, 21), t1=(1, 3), t2=(1, 2), compute=(1, 9)))
    assert whole.speeds["p0"] / whole.speeds["p1"] == pytest.approx(2)
    lines = controller(Retiler.published()).observe(20, measured(range(1, 21), t1=(2, 3), t2=(1, 2), compute=(1, 9)))
    assert lines.speeds["p0"] / lines.speeds["p1"] == pytest.approx(1.5)
    assert isinstance(lines.layout, Layout)
    assert lines.layout.replicas[0].heights == pytest.approx((0.6, 0.4))
    assert lines.layout.replicas[0].width == 1.0
    assert lines.layout.processors == ("p0", "p1")


def test_the_published_first_check_remaps_the_whole_even_where_all_is_well() -> None:
    found = controller(Retiler.published(), known=False).observe(
        20, measured(range(1, 21), t1=(1, 1), t2=(1, 1), compute=(1, 1))
    )
    assert found.kind is DecisionKind.WHOLE
    assert "first check without known speeds" in found.reason


def test_known_speeds_of_the_retiler_override_how_the_model_was_tiled() -> None:
    same = measured(range(1, 21), t1=(1, 1), t2=(1, 1), compute=(1, 1))
    assert controller(Retiler.published(known_speeds=True), known=False).observe(20, same).kind is DecisionKind.KEEP
    assert controller(Retiler.published(known_speeds=False), known=True).observe(20, same).kind is DecisionKind.WHOLE


def test_the_log_line_of_a_remapping() -> None:
    found = controller(Retiler(rule="settling")).observe(20, measured(range(1, 21), t1=(1, 1), t2=(1, 1), compute=(1, 3)))
    assert str(found) == (
        "check 1 (iteration 20): compute min/max 0.33 < 0.40: re-map whole; speeds p0 1.00 p1 0.33; 1 -> 2 replicas; "
        "80 of 160 unit rows move; compute min/max 1.00 expected"
    )
    assert found.predicted == pytest.approx(1.0)
    found = controller(Retiler(rule="settling")).observe(20, measured(range(1, 21), t1=(1, 1), t2=(1, 1), compute=(3, 5)))
    assert str(found) == (
        "check 1 (iteration 20): compute min/max 0.60 < 0.80: re-map replicas; speeds p0 1.00 p1 0.60; 1 replica; "
        "10 of 80 unit rows move; compute min/max 1.00 expected"
    )


def test_only_points_since_the_last_remapping_count() -> None:
    one = controller(Retiler(every=4))
    slow = measured(range(1, 5), t1=(1, 1), t2=(1, 1), compute=(3, 5))
    assert one.observe(4, slow).kind is DecisionKind.REPLICAS
    told = one.observe(5, [*slow, *measured(range(5, 6), t1=(1, 1), t2=(1, 1), compute=(4, 4))])
    assert str(told) == "check 2 (iteration 5): p0 has 1 of the 2 timings needed since the last re-mapping: keep"
    told = one.observe(6, [*slow, *measured(range(5, 7), t1=(1, 1), t2=(1, 1), compute=(4, 4))])
    assert told.ratio == 1.0


def test_only_the_last_window_counts() -> None:
    early = measured(range(1, 15), t1=(1, 1), t2=(1, 1), compute=(1, 9))
    late = measured(range(15, 21), t1=(1, 1), t2=(1, 1), compute=(1, 1))
    assert controller(Retiler(rule="settling")).observe(20, [*early, *late]).ratio == 1.0


def test_a_clear_change_is_acted_on_and_a_doubtful_one_is_waited_for() -> None:
    noisy = [1.0, 2.0, 0.6, 1.9, 0.7, 2.2]
    timings = [
        Timing(processor=name, iteration=15 + index, t1_s=1, t2_s=1, compute_s=own, work=40960.0)
        for index, value in enumerate(noisy)
        for name, own in (("p0", 1.0), ("p1", value))
    ]
    found = controller(Retiler(rule="settling")).observe(20, timings)
    assert found.kind is DecisionKind.KEEP
    assert "< 0.80, but the noise is 3 x 0." in found.reason
    assert controller(Retiler(certainty=0.0)).observe(20, timings).kind is DecisionKind.REPLICAS


def test_two_windows_together_see_what_one_cannot() -> None:
    one = controller(Retiler(rule="settling"))
    decisions = []
    for check in (1, 2):
        timings = [
            # One window: 0.66 (1 + 3 x 0.076) = 0.81. Two: 0.66 (1 + 3 x 0.051) = 0.76, below 0.80.
            Timing(processor=name, iteration=iteration, t1_s=1, t2_s=1, compute_s=mean * (0.88, 1.12)[iteration % 2], work=1.0)
            for iteration in range(20 * check - 5, 20 * check + 1)
            for name, mean in (("p0", 0.66), ("p1", 1.0))
        ]
        decisions.append(one.observe(20 * check, timings))
    assert [decision.kind for decision in decisions] == [DecisionKind.KEEP, DecisionKind.REPLICAS]
    assert decisions[0].reason.endswith("compute min/max 0.66 < 0.80, but the noise is 3 x 0.08: keep")


def test_every_rank_decides_the_same_whatever_the_order_of_the_timings() -> None:
    runs = [run([1.0, 0.7, 0.5, 0.31, 0.9], noise=0.1, seed=3) for _ in range(2)]
    runs[0].iterations(19)
    runs[1].iterations(19)
    random.Random(1).shuffle(runs[1].timings)
    first, second = (trial.checks(1)[0] for trial in runs)
    assert first == second
    assert first.remaps


def test_a_processor_without_a_tile_keeps_its_speed_and_comes_back() -> None:
    coarse = Workload.mlp(4, 4, 2, samples=8)
    cluster = Cluster.from_speeds([1.0, 1.0, 0.1])
    with pytest.warns(UserWarning, match="leaves out p2"):
        layout = plan("srpm", cluster=cluster, workload=coarse).layout
    one = Controller(Retiler(rule="settling"), cluster=cluster, workload=coarse, layout=layout, known_speeds=True)
    timings = [
        Timing(processor=name, iteration=iteration, t1_s=1, t2_s=1, compute_s=own, work=16.0)
        for iteration in range(15, 21)
        for name, own in (("p0", 5.0), ("p1", 20.0))
    ]
    found = one.observe(20, timings)
    assert found.kind is DecisionKind.WHOLE
    # p0 does 3.2 a second where 1.0 was given, p1 0.8: on their median scale of 2.0, p2 does 0.2.
    assert found.speeds == pytest.approx({"p0": 3.2, "p1": 0.8, "p2": 0.2})


def test_strangers_are_refused() -> None:
    with pytest.raises(PlanError, match="the layout has p1, but the cluster only p0"):
        controller(Retiler(rule="settling"), speeds=(1,))
    stranger = Timing(processor="px", iteration=3, t1_s=1, t2_s=1, compute_s=1, work=1)
    with pytest.raises(PlanError, match="a timing of 'px' in iteration 3, but the cluster only has p0, p1"):
        controller(Retiler(rule="settling")).observe(20, [stranger])


def test_a_thousand_processors_are_checked_in_time_and_told_briefly() -> None:
    draws = random.Random(2)
    trial = run([draws.uniform(0.2, 1.0) for _ in range(1000)], workload=Workload.mlp(203, 4096, 26, samples=65536))
    trial.iterations(14)
    (decision,) = trial.checks(1)
    assert decision.kind is DecisionKind.WHOLE
    assert "... (1000 in all)" in decision.reason
    assert len(decision.reason) < 400
    assert trial.imbalance < 1.25


@pytest.mark.parametrize(
    ("points", "speed"),
    [
        pytest.param([(0.5, 10.0)] * 6, 20.0, id="work over time of equal iterations"),
        # Points (1, 2), (2, 4), (4, 6): means 7/3 and 4; sum of products 6, of squares 42/9.
        pytest.param([(1.0, 2.0), (1.0, 2.0), (2.0, 2.0)], 6 / (42 / 9), id="the slope of unequal iterations"),
        pytest.param([(2.0, 10.0)], 5.0, id="the mean of one point"),
        pytest.param([(2.0, 8.0), (0.0, 2.0), (0.0, 0.0)], 5.0, id="the mean where the slope is not positive"),
        *(pytest.param(points, None, id="nothing") for points in ([], [(0.0, 5.0)] * 3, [(1.0, 0.0)] * 3)),
    ],
)
def test_an_ability_is_a_slope_or_a_mean(points: list[tuple[float, float]], speed: float | None) -> None:
    assert ability(points) == (speed if speed is None else pytest.approx(speed))


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


LAYOUT = Layout(
    replicas=(
        Replica(width=0.25, processors=("a", "b", "c"), heights=(0.2, 0.3, 0.5)),
        Replica(width=0.75, processors=("d", "e"), heights=(0.5, 0.5)),
    )
)


def test_heights_follow_the_speeds_of_the_replica() -> None:
    new = recut(LAYOUT, speeds={"a": 1, "b": 1, "c": 2, "d": 30, "e": 10}, units=80)
    assert [replica.width for replica in new.replicas] == [0.25, 0.75]
    assert [replica.processors for replica in new.replicas] == [("a", "b", "c"), ("d", "e")]
    assert [replica.heights for replica in new.replicas] == [(0.25, 0.25, 0.5), (0.75, 0.25)]


@given(speeds=st.lists(st.floats(1e-6, 1e6), min_size=5, max_size=5), units=st.integers(3, 100))
def test_nobody_is_left_without_a_unit(speeds: list[float], units: int) -> None:
    new = recut(LAYOUT, speeds=dict(zip("abcde", speeds, strict=True)), units=units)
    assert all(tile.units.size >= 1 for tile in new.cut(samples=100, units=units).tiles)


def test_forecast_knows_that_the_slowest_of_every_block_counts() -> None:
    heads = Block(units=2, unit_parameters=1, forward_elements=1, flop_per_unit=30.0)
    hidden = Block(units=60, unit_parameters=1, forward_elements=1, flop_per_unit=1.0)
    layout = Layout(replicas=(Replica(width=1.0, processors=("a", "b"), heights=(0.75, 0.25)),))
    speeds = {"a": 3.0, "b": 1.0}
    fine = forecast(layout, workload=Workload(samples=10, blocks=(hidden, hidden)), speeds=speeds)
    coarse = forecast(layout, workload=Workload(samples=10, blocks=(heads, hidden)), speeds=speeds)
    assert (fine.ratio, fine.slowest) == pytest.approx((1.0, 10 * 2 * 15))
    # a has both heads and waits for nobody there; b has none, and 15 hidden units.
    assert coarse.slowest == pytest.approx(10 * (60 / 3 + 15))
    assert coarse.ratio == pytest.approx(15 / (20 + 15))


def test_a_network_without_blocks_keeps_its_replicas() -> None:
    layout = Layout(replicas=tuple(Replica(width=0.5, processors=(name,), heights=(1.0,)) for name in "ab"))
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
