"""The time-based planner: never worse than any other, and it knows hosts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor
from tatami.tiling import AlphaBetaCost, compare, plan
from tatami.tiling.timed import balanced
from tatami.workload import Workload

SLOW_NETWORK = Link(bandwidth_bytes_per_s=1e6, latency_s=1e-3)


@given(
    drawn=st.lists(st.tuples(st.floats(0.1, 10.0), st.sampled_from("abc")), min_size=1, max_size=8),
    net=st.tuples(st.integers(1, 300), st.integers(30, 300), st.integers(1, 300)),
    flop_per_s=st.sampled_from([1e8, 1e10, 1e12]),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_no_planner_is_faster(drawn: list[tuple[float, str]], net: tuple[int, int, int], flop_per_s: float) -> None:
    processors = tuple(Processor(name=f"p{i}", speed=speed, host=host) for i, (speed, host) in enumerate(drawn))
    plans = compare(
        ["timed", "even", "grid", "grid-rev", "srpm", "weighted"],
        cluster=Cluster(processors=processors),
        workload=Workload.mlp(*net, samples=500),
        cost=AlphaBetaCost(flop_per_s=flop_per_s),
    )
    if not any(one.left_out for one in plans):
        assert plans[0].predicted_s <= min(one.predicted_s for one in plans)


def test_columns_stay_on_a_host_where_the_network_is_slow_and_vertical_sums_are_large() -> None:
    # Ascending order would pair p0 with p2 and p1 with p3, across the network.
    processors = tuple(Processor(name=f"p{i}", speed=speed, host="ab"[i % 2]) for i, speed in enumerate([1.0, 2.0, 1.1, 2.1]))
    cluster = Cluster(processors=processors, network=SLOW_NETWORK)
    workload = Workload.mlp(10, 400, 100, samples=20_000)
    result = plan("timed", cluster=cluster, workload=workload, cost=AlphaBetaCost(flop_per_s=1e12))
    hosts = [{cluster.by_name[name].host for name in column.processors} for column in result.layout.columns]
    assert hosts == [{"a"}, {"b"}]
    assert (
        result.predicted_s < plan("srpm", cluster=cluster, workload=workload, cost=AlphaBetaCost(flop_per_s=1e12)).predicted_s
    )


def test_balanced_tiles_compute_for_the_same_time() -> None:
    processors = Cluster.from_speeds([0.5, 1.0, 2.0, 3.0]).processors
    workload = Workload.mlp(203, 80, 26, samples=1024)
    layout = balanced([processors[:3], processors[3:]], workload=workload)
    assert layout is not None
    elapsed = [
        workload.flop(width=column.width, height=height) / processors[int(name[1])].speed
        for column in layout.columns
        for name, height in zip(column.processors, column.heights, strict=True)
    ]
    assert elapsed == pytest.approx([elapsed[0]] * 4)


def test_a_processor_slower_than_what_a_column_repeats_has_no_balance() -> None:
    processors = Cluster.from_speeds([1e-9, 1.0]).processors
    assert balanced([processors], workload=Workload.mlp(203, 80, 26, samples=1024)) is None
