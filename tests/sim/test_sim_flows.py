"""Links divided among transfers: rates are max-min fair, and times are SimGrid's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_rig import Transfers, call, ends

from simgrid_here import needs_simgrid
from tatami.cluster import Cluster, Link, Processor
from tatami.collective import Sync
from tatami.sim.allreduce import Case, replay
from tatami.sim.flows import Flow, Flows, Lane, LinkPath, rates_of
from tatami.sim.platforms import AbstractPlatform, ClusterPlatform, preset
from tatami.sim.stage import Stage, play


def flow(lanes: Sequence[Lane], *, latency_s: float = 1.0, size_bytes: float = 1.0, most_bytes_per_s: float = 1e9) -> Flow:
    most = min([most_bytes_per_s, *(lane.bandwidth_bytes_per_s for lane in lanes)])
    path = LinkPath(latency_s=latency_s, lanes=tuple(lanes), most_bytes_per_s=most, weight=1 / latency_s)
    return Flow(what=None, path=path, left_bytes=size_bytes)


@st.composite
def crowds(draw: st.DrawFn) -> list[Flow]:
    """Transfers over a few links, some of which have latencies of their own."""
    lanes = [Lane(bandwidth_bytes_per_s=draw(st.sampled_from([1.0, 2.0, 3.5, 10.0]))) for _ in range(draw(st.integers(1, 6)))]
    ways = st.lists(st.sampled_from(lanes), min_size=1, max_size=4, unique_by=id)
    made = st.builds(flow, ways, latency_s=st.sampled_from([0.5, 1.0, 2.0]), most_bytes_per_s=st.sampled_from([0.7, 1e9]))
    return draw(st.lists(made, min_size=1, max_size=10))


@settings(deadline=None, max_examples=60)
@given(crowd=crowds())
def test_rates_are_max_min_fair(crowd: list[Flow]) -> None:
    """No link is more than full, and each transfer is as fast as it may be, or passes a full link on which none gets more."""
    rates = rates_of(crowd)
    lanes = {lane for each in crowd for lane in each.path.lanes}
    on = {lane: [each for each in crowd if lane in each.path.lanes] for lane in lanes}
    used = {lane: sum(rates[each] for each in on[lane]) for lane in lanes}
    assert all(used[lane] <= lane.bandwidth_bytes_per_s * (1 + 1e-9) for lane in lanes)
    for each in crowd:
        full = [lane for lane in each.path.lanes if used[lane] >= lane.bandwidth_bytes_per_s * (1 - 1e-9)]
        level = rates[each] / each.weight
        assert rates[each] >= each.path.most_bytes_per_s * (1 - 1e-9) or any(
            level >= rates[other] / other.weight * (1 - 1e-9) for lane in full for other in on[lane]
        )


def test_only_those_that_a_change_reaches_are_looked_at() -> None:
    """Two share a link; a third is elsewhere, and keeps its time. When one has gone, the other is as fast as the link."""
    flows, shared, apart = Flows(), Lane(bandwidth_bytes_per_s=10.0), Lane(bandwidth_bytes_per_s=4.0)
    one, two, other = flow([shared], size_bytes=20.0), flow([shared], size_bytes=30.0), flow([apart], size_bytes=8.0)
    for each in (one, two, other):
        flows.add(each)
    assert [(each.rate_bytes_per_s, each.ends_s) for each in flows.divide(1.0)] == [(5.0, 5.0), (5.0, 7.0), (4.0, 3.0)]
    flows.remove(one)
    assert list(flows.divide(3.0)) == [two]
    assert (two.left_bytes, two.rate_bytes_per_s, two.ends_s) == (20.0, 10.0, 5.0)
    assert list(flows.divide(4.0)) == []


def two_on_each(machines: int) -> ClusterPlatform:
    processors = tuple(Processor(name=f"p{rank}", speed=1.0, host=f"h{rank // 2}") for rank in range(2 * machines))
    local = Link(bandwidth_bytes_per_s=3e9, latency_s=1e-6)
    network = Link(bandwidth_bytes_per_s=1e9, latency_s=2e-5)
    return ClusterPlatform(cluster=Cluster(processors=processors, local=local, network=network))


@needs_simgrid
@pytest.mark.parametrize("platform", [preset("oakforest-like", nodes=60), two_on_each(5)])
def test_transfers_take_the_times_of_simgrid(platform: AbstractPlatform) -> None:
    """Of many sizes, each host sending three at once, so that links are shared by several, some of them near."""
    hosts = len(platform.hosts)
    sends = tuple(
        (host, (host + step) % hosts, 1e5 * (1 + (7 * host + 3 * step) % 11)) for host in range(hosts) for step in (1, 24, 25)
    )
    sends = tuple((source, target, size) for source, target, size in sends if source != target)
    expected, found = (
        call(ends, Transfers(platform=platform, sends=sends, waits=(1e-5,), meet_few=few)) for few in (False, True)
    )
    for key, at_s in expected.times.items():
        assert found.times[key] == pytest.approx(at_s, rel=1e-6)
    assert found.bytes_moved == expected.bytes_moved


EVEN, UNEVEN = 4 * 60 * 1666, 4 * 100_003


@needs_simgrid
@pytest.mark.parametrize(
    "case",
    [
        Case(algorithm="native", ranks=60, size_bytes=EVEN),
        Case(algorithm="ring", ranks=60, size_bytes=EVEN),
        Case(algorithm="torus", ranks=60, size_bytes=EVEN, grid=(6, 10), across="halving_doubling"),
        Case(algorithm="native", ranks=60, size_bytes=UNEVEN),
        Case(algorithm="ring", ranks=60, size_bytes=UNEVEN),
        Case(algorithm="torus_put", ranks=60, size_bytes=UNEVEN, grid=(2, 30)),
        Case(algorithm="torus_put", ranks=60, size_bytes=UNEVEN, grid=(5, 12), sync=Sync.FENCE),
        Case(algorithm="torus_put", ranks=60, size_bytes=UNEVEN, grid=(30, 2), sync=Sync.LOCK),
    ],
)
def test_all_reduces_take_the_times_of_simgrid(case: Case) -> None:
    """SimGrid tells no times apart that are nearer than 1e-9 s: so far it is off in rounds whose parts differ by an element."""
    job = case.job(preset("oakforest-like", nodes=case.ranks))
    found, expected = call(replay, job), call(replay, replace(job, lean=False))
    rounds = 0 if case.size_bytes == EVEN else sum(max(phase.num_rounds, 12) for phase in job.schedule.phases)
    ends_s = [at_s for _, at_s in expected.phases]
    assert [at_s for _, at_s in found.phases] == pytest.approx(ends_s, rel=1e-9, abs=1e-9 * rounds)
    assert found.total_s == pytest.approx(expected.total_s, rel=1e-9, abs=1e-9 * rounds)
    assert found.bytes_moved == expected.bytes_moved


@needs_simgrid
def test_a_transfer_that_is_broken_off_leaves_its_link_to_others() -> None:
    """Two of 1e9 bytes out of one node at 12.5e9 bytes/s: one stops with a quarter of it moved, a third before its start."""
    first_s, second_bytes = call(_broken_off, preset("oakforest-like", nodes=4))
    assert first_s == pytest.approx(0.04 + 0.75e9 / 12.5e9 + 5e-7, rel=1e-9)
    assert second_bytes == pytest.approx(0.25e9, rel=1e-9)


def _broken_off(platform: AbstractPlatform) -> tuple[float, float]:
    def act(stage: Stage) -> Callable[[], tuple[float, float]]:
        ended: list[float] = []
        stage.send(0, 1, size_bytes=1e9, then=lambda: ended.append(stage.now_s))
        second, third = (stage.send(0, target, size_bytes=1e9, then=lambda: ended.append(0.0)) for target in (2, 3))
        stage.cancel(third)
        stage.after(5e-7 + 0.04, lambda: stage.cancel(second))
        return lambda: (ended[0], stage.bytes_moved - 1e9)

    return play(platform, act, meet_few=True)
