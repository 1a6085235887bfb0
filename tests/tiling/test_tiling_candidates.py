"""The planner of least predicted time: never worse than another, and few of its candidates priced."""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor
from tatami.errors import MemoryLackError
from tatami.tiling import PLANNERS, AbstractCost, AlphaBetaCost, Cost, Layout, TimedPlanner, compare, plan
from tatami.workload import Workload, gpt_workload, net_workload


def cluster_of(speeds: Sequence[float], *, per_host: int, network: float) -> Cluster:
    processors = tuple(Processor(name=f"p{i}", speed=speed, host=f"h{i // per_host}") for i, speed in enumerate(speeds))
    return Cluster(
        processors=processors,
        local=Link(bandwidth_bytes_per_s=8e9, latency_s=1e-6),
        network=Link(bandwidth_bytes_per_s=network, latency_s=3e-5),
    )


clusters = st.builds(
    cluster_of,
    st.lists(st.floats(0.2, 1.0), min_size=1, max_size=90),
    per_host=st.integers(1, 12),
    network=st.sampled_from([1e7, 1e8, 1e9, 1e11]),
)
workloads = st.sampled_from(
    [
        net_workload("203-800-26", samples=4096),
        net_workload("1024-4096-4096-16", samples=1024),
        gpt_workload(layers=3, width=192, heads=96, tokens=32, samples=512, vocabulary=100),
        Workload(samples=1024, replicated_parameters=10**6, replicated_flop_per_sample=10**7),
    ]
)


@given(cluster=clusters, workload=workloads)
def test_it_is_never_worse_than_another_planner(cluster: Cluster, workload: Workload) -> None:
    cost = AlphaBetaCost()
    prices = {}
    for name, planner in PLANNERS.items():
        layout = planner.layout(cluster=cluster, workload=workload, cost=cost)
        if not layout.empty(workload):
            prices[name] = cost.price(layout, cluster=cluster, workload=workload).total
    if prices:
        assert prices["timed"] <= min(prices.values()) * (1 + 1e-9)


piles = st.lists(st.floats(-9.0, 0.0).map(lambda power: 10**power), min_size=1, max_size=8)


@given(speeds=piles, network=st.sampled_from([1e6, 1e8, 1e11]), workload=workloads)
def test_nor_where_machines_are_too_slow_for_a_sample(speeds: list[float], network: float, workload: Workload) -> None:
    """Whoever plans shares in proportion to speed leaves these out; equal shares would have all others wait for days."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plans = compare(cluster=cluster_of(speeds, per_host=2, network=network), workload=workload)
    timed = next(each for each in plans if each.planner == "timed")
    assert timed.predicted_s <= min(each.predicted_s for each in plans) * (1 + 1e-9)
    assert set(timed.left_out) == {f"p{rank}" for rank in range(len(speeds))} - set(timed.layout.processors)


def test_where_all_processors_have_no_room_another_planner_may_find_some_without_the_slow() -> None:
    speeds = [0.56, 0.87, 3.9e-5, 8.6e-4, 0.029, 8.5e-5, 0.57, 5.2e-5]
    memory = [82_405, 38_282, 6_657_568, 10_440_852, 244_875, 114_078, 2_595_987, 10_893_640]
    cluster = cluster_of(speeds, per_host=3, network=1e8)
    sized = (replace(each, memory_bytes=size) for each, size in zip(cluster.processors, memory, strict=True))
    cluster = replace(cluster, processors=tuple(sized))
    workload = net_workload("203-80-26", samples=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        srpm, timed = compare(["srpm", "timed"], cluster=cluster, workload=workload)
    assert timed.predicted_s <= srpm.predicted_s
    assert set(srpm.left_out) == set(timed.left_out) == {"p2", "p3", "p5", "p7"}
    assert all(size <= dict(zip(cluster.by_name, memory, strict=True))[name] for name, size in timed.memory_bytes.items())
    with pytest.raises(MemoryLackError, match="there is no room"):
        plan("timed", cluster=cluster, workload=replace(workload, state_bytes_per_parameter=5e3))


@given(cluster=clusters, workload=workloads, planner=st.sampled_from(sorted(PLANNERS)), overlaps=st.booleans())
def test_a_bound_is_no_higher_than_the_price(cluster: Cluster, workload: Workload, planner: str, overlaps: bool) -> None:
    cost = AlphaBetaCost(flop_per_s=1e9 if overlaps else None)
    workload = replace(workload, overlaps_sums=overlaps)
    layout = PLANNERS[planner].layout(cluster=cluster, workload=workload, cost=cost)
    price = cost.price(layout, cluster=cluster, workload=workload).total
    assert 0 < cost.at_least(layout, cluster=cluster, workload=workload) <= price * (1 + 1e-9)


@final
@dataclass(frozen=True, kw_only=True)
class Counted(AbstractCost):
    """Counts what is priced."""

    true: AlphaBetaCost = field(default_factory=AlphaBetaCost)
    bounds: bool = True
    priced: list[Layout] = field(default_factory=list)

    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:
        self.priced.append(layout)
        return self.true.price(layout, cluster=cluster, workload=workload)

    def at_least(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> float:
        return self.true.at_least(layout, cluster=cluster, workload=workload) if self.bounds else 0.0


@pytest.mark.parametrize("size", [60, 240])
def test_bounds_leave_out_most_candidates_and_change_nothing(size: int) -> None:
    chance = random.Random(size)
    cluster = cluster_of([chance.uniform(0.3, 1.0) for _ in range(size)], per_host=8, network=1.25e9)
    workload = net_workload("203-8000-26", samples=32768)
    quick, thorough = Counted(), Counted(bounds=False)
    planner = TimedPlanner()
    layouts = [planner.layout(cluster=cluster, workload=workload, cost=cost) for cost in (quick, thorough)]
    assert layouts[0] == layouts[1]
    assert len(quick.priced) < len(thorough.priced) / 3


def test_a_host_of_any_number_of_ranks_can_be_a_replica() -> None:
    """Hosts of 2, 5 and 3 ranks on a thin network, with sums that are many times the weights."""
    hosts = ["a"] * 2 + ["b"] * 5 + ["c"] * 3
    cluster = Cluster(
        processors=tuple(Processor(name=f"p{i}", speed=1.0, host=host) for i, host in enumerate(hosts)),
        local=Link(bandwidth_bytes_per_s=1e11, latency_s=1e-7),
        network=Link(bandwidth_bytes_per_s=1e7, latency_s=1e-4),
    )
    workload, cost = net_workload("512-8192-512", samples=4096), Counted(bounds=False)
    TimedPlanner().layout(cluster=cluster, workload=workload, cost=cost)
    by_name = cluster.by_name
    tried = [
        sorted(sorted(by_name[name].host for name in replica.processors) for replica in each.replicas) for each in cost.priced
    ]
    assert [["a"] * 2, ["b"] * 5, ["c"] * 3] in tried
