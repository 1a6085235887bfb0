"""When a re-tiling pays (the ski-rental rule), by which sizes, and over whole courses of slowdowns."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor, SpeedTable, speed_at
from tatami.retiling import Retiler, Watcher
from tatami.retiling.replica_cuts import works_of
from tatami.retiling.sizes import SizedTimes
from tatami.retiling.ski_rental import Rental, expected_rest
from tatami.retiling.watching import Found
from tatami.tiling import AlphaBetaCost, Layout, plan
from tatami.workload import Workload

PRICE = st.floats(0.01, 100.0)
LOSS = st.one_of(st.floats(0.0, 0.1), st.floats(0.0, 5.0), st.floats(0.0, 500.0))
CHANGE = st.tuples(PRICE, st.lists(LOSS, min_size=1, max_size=40))


def play(changes: list[tuple[float, list[float]]], *, learn: bool = True) -> tuple[float, float]:
    """What the rule and an oracle pay for changes, each with its price and the loss of each of its iterations."""
    account = Rental()
    paid, oracle, lengths = 0.0, 0.0, list[int]()
    for price_s, losses in changes:
        for lasted, loss_s in enumerate(losses):
            if account.due(price_s, rate_s=loss_s, rest=expected_rest(lengths, lasted=lasted) if learn else None):
                account.moved(price_s, rate_s=loss_s)
                paid += price_s
                break
            account.lose(loss_s)
            paid += loss_s
        else:
            account.ended(price_s)
        lengths.append(len(losses))
        oracle += min(math.fsum(losses), price_s)
    return paid, oracle


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(CHANGE, min_size=1, max_size=12))
def test_it_never_costs_more_than_twice_the_oracle(changes: list[tuple[float, list[float]]]) -> None:
    for learn in (False, True):
        paid, oracle = play(changes, learn=learn)
        assert paid <= 2 * oracle * (1 + 1e-9)


def test_the_bound_is_reached_where_the_change_ends_as_soon_as_the_price_was_paid() -> None:
    paid, oracle = play([(10.0, [1.0] * 11)])
    assert (paid, oracle) == (20.0, 10.0)


def test_the_past_makes_it_better() -> None:
    """Changes that always end before they are worth a move: the bank pays for waiting; then long ones: it moves earlier."""
    short = [(10.0, [1.0] * 12)] * 20
    few = [(10.0, [1.0] * 3)] * 5
    assert play(few + short)[0] < play(few + short, learn=False)[0]
    long = [(10.0, [1.0] * 3)] * 5 + [(10.0, [1.0] * 300)] * 12
    assert play(long)[0] <= play(long, learn=False)[0]


def test_the_expected_rest() -> None:
    assert expected_rest([5, 6], lasted=0) is None
    assert expected_rest([5, 10, 20], lasted=0) == 10
    assert expected_rest([5, 10, 20], lasted=7) == pytest.approx(8)
    assert expected_rest([5, 10, 20], lasted=30) == 30


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
    # The newest is always believed, unless it is within 3 % of what was expected, which then stands.
    expected = sizes.at(0, work=points[-1][0])
    assert expected is not None
    assert points[-1][1] == pytest.approx(expected, rel=0.0301)


def test_after_an_alarm_the_height_is_measured_and_the_ratio_that_was_noticed_makes_no_curve() -> None:
    sizes = learned((100.0, 2.0))
    sizes.scale(0, 4.5)  # noticed after few samples; it is 4 times
    sizes.learn(0, work=30.0, per_work_s=8.0, error=0.01)
    assert sizes.points(0) == ((100.0, 8.0),)
    sizes.learn(0, work=300.0, per_work_s=12.0, error=0.01)
    assert sizes.points(0) == ((100.0, 8.0), (300.0, 12.0))


SPEEDS = 2e10 * np.array((0.25, 0.31, 0.63, 1.0, 1.0, 0.42, 0.67, 0.63))
NETWORK = Workload.mlp(203, 800, 26, samples=16384)
CLUSTER = Cluster(
    processors=tuple(Processor(name=f"p{rank}", speed=speed, host=f"h{rank}") for rank, speed in enumerate(SPEEDS)),
    network=Link(bandwidth_bytes_per_s=1.25e8, latency_s=5e-5),
)
TRACES = (((33, 4, 1.5), (53, 4, 1.0), (73, 1, 4.0)), ((41, 6, 4.0), (61, 6, 1.0)), ((22, 0, 1.5), (42, 0, 1.0), (70, 2, 2.0)))
"""Each change: after which iteration, who, and how many times as slow as at first."""
ITERATIONS, NOISE, LATE = 120, 0.1, 4
LOOK_S, MOVE_S = 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class Course:
    total_s: float
    looks: int
    moves: int


def iteration_s(layout: Layout, slower: np.ndarray) -> float:
    works = works_of(layout, workload=NETWORK)
    price = AlphaBetaCost(flop_per_s=1.0).price(layout, cluster=CLUSTER, workload=NETWORK)
    flop = NETWORK.work_flop * np.array([works.get(f"p{rank}", 0.0) for rank in range(8)])
    compute_s = float((flop * slower / SPEEDS).max())
    return compute_s + price.tensor_parallel + price.gradients


def told(trace: tuple[tuple[int, int, float], ...]) -> float:
    """Seconds where each change is told, and acted on, as late as it is noticed at this noise; its moves cost as much."""
    slower, known = np.ones(8), np.ones(8)
    layout, total_s = plan(cluster=CLUSTER, workload=NETWORK).layout, 0.0
    for iteration in range(1, ITERATIONS + 1):
        total_s += iteration_s(layout, slower)
        for after, rank, factor in trace:
            if iteration == after:
                slower[rank] = factor
            if iteration == after + LATE:
                known[rank] = factor
                own = tuple(replace(one, speed=s / k) for one, s, k in zip(CLUSTER.processors, SPEEDS, known, strict=True))
                layout = plan(cluster=replace(CLUSTER, processors=own), workload=NETWORK).layout
                total_s += MOVE_S
    return total_s


def watched(trace: tuple[tuple[int, int, float], ...], *, seed: int) -> Course:
    random, slower = np.random.default_rng(seed), np.ones(8)
    layout = plan(cluster=CLUSTER, workload=NETWORK).layout
    watcher = Watcher(Retiler(), cluster=CLUSTER, workload=NETWORK, layout=layout, known_speeds=True)
    total_s, looks, moves = 0.0, 0, 0

    def planned(leader: str, compute: Callable[[], Found]) -> tuple[Found, float]:  # noqa: ARG001
        nonlocal looks
        looks += 1
        return compute(), LOOK_S

    watcher.planned = planned
    for iteration in range(1, ITERATIONS + 1):
        total_s += iteration_s(watcher.layout, slower)
        values = slower * np.exp(NOISE * random.standard_normal(8)) * NETWORK.work_flop / SPEEDS
        decision = watcher.take(iteration, values)
        if decision is not None and decision.remaps:
            moves += 1
            watcher.moved(MOVE_S)
        for after, rank, factor in trace:
            if iteration == after:
                slower[rank] = factor
    return Course(total_s=total_s + LOOK_S * looks + MOVE_S * moves, looks=looks - moves, moves=moves)


def test_courses_take_little_more_than_if_all_were_told_that_is_noticed() -> None:
    courses = [(watched(trace, seed=seed), told(trace)) for trace in TRACES for seed in range(2)]
    assert sum(course.total_s for course, _ in courses) < 1.07 * sum(best_s for _, best_s in courses)
    assert max(course.looks for course, _ in courses) <= 12
    assert max(course.moves for course, _ in courses) <= 5
