"""Links divided among transfers: rates are max-min fair, and times are SimGrid's."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_rig import Transfers, ends
from simgrid_reference import simgrid_ends_s

from simgrid_here import needs_simgrid
from tatami.cluster import Cluster, Link, Processor
from tatami.sim.flows import Flow, Flows, Lane, LinkPath, rates_of
from tatami.sim.platforms import RDMA, TCP, AbstractPlatform, ClusterPlatform, Fabric, MachineGroup, Tree, Wire, preset
from tatami.sim.stage import Stage, play


def flow(lanes: Sequence[Lane], *, latency_s: float = 1.0, size_bytes: float = 1.0, most_bytes_per_s: float = 1e9) -> Flow:
    most = min([most_bytes_per_s, *(lane.bandwidth_bytes_per_s for lane in lanes)])
    path = LinkPath(latency_s=latency_s, lanes=dict.fromkeys(lanes, 1.0), most_bytes_per_s=most, weight=1 / latency_s)
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
    flows.remove(one, now_s=3.0)
    assert list(flows.divide(3.0)) == [two]
    assert (two.left_bytes, two.rate_bytes_per_s, two.ends_s) == (20.0, 10.0, 5.0)
    assert list(flows.divide(4.0)) == []


def two_on_each(machines: int) -> ClusterPlatform:
    processors = tuple(Processor(name=f"p{rank}", speed=1.0, host=f"h{rank // 2}") for rank in range(2 * machines))
    local = Link(bandwidth_bytes_per_s=3e9, latency_s=1e-6)
    network = Link(bandwidth_bytes_per_s=1e9, latency_s=2e-5)
    return ClusterPlatform(cluster=Cluster(processors=processors, local=local, network=network))


def tree(fabric: Fabric, *, duplex: bool) -> Tree:
    """Two clusters of two sizes, of which one has a backbone, behind backbones; a store on a fat link."""
    near, far = (
        Wire(bandwidth_bytes_per_s=rate, latency_s=latency_s, duplex=duplex) for rate, latency_s in ((1e8, 1e-3), (3e8, 7e-4))
    )
    backbone = Wire(bandwidth_bytes_per_s=1.5e8, latency_s=2e-3)
    return Tree(
        name="two",
        backbone=Wire(bandwidth_bytes_per_s=4e8, latency_s=4e-3),
        groups=(
            MachineGroup(name="a", backbone=backbone, groups=(MachineGroup(name="node", count=3, link=near),)),
            MachineGroup(name="b", link=far, groups=(MachineGroup(name="node", count=4, link=near),)),
            MachineGroup(name="store", link=Wire(bandwidth_bytes_per_s=2e8, latency_s=1e-4, fat=True)),
        ),
        fabric=fabric,
    )


@needs_simgrid
@pytest.mark.parametrize("sizes", [(1e5,), (1e3, 1e6, 3e7)])
@pytest.mark.parametrize(
    "platform",
    [
        preset("oakforest-like", nodes=60),
        two_on_each(5),
        *(tree(fabric, duplex=duplex) for fabric in (RDMA, TCP) for duplex in (False, True)),
    ],
    ids=["fat tree", "cluster", "RDMA, shared", "RDMA, duplex", "TCP, shared", "TCP, duplex"],
)
def test_transfers_take_the_times_of_simgrid(platform: AbstractPlatform, sizes: tuple[float, ...]) -> None:
    """Of many sizes, each host sending three at once, so that links are shared by several, some of them near."""
    hosts = len(platform.hosts)
    sends = tuple(
        (host, (host + step) % hosts, sizes[(host + step) % len(sizes)] * (1 + (7 * host + 3 * step) % 11))
        for host in range(hosts)
        for step in (1, 24, 25)
        if step % hosts and not all(cable.fat for cable in platform.way(host, (host + step) % hosts))
    )
    transfers = Transfers(platform=platform, sends=sends)
    expected_s, found = simgrid_ends_s(transfers), ends(transfers)
    for index, at_s in enumerate(expected_s):
        assert found.times["send", index] == pytest.approx(at_s, rel=1e-6)


def test_a_transfer_that_is_broken_off_leaves_its_link_to_others() -> None:
    """Two of 1e9 bytes out of one node at 12.5e9 bytes/s: one stops with a quarter of it moved, a third before its start."""
    first_s, second_bytes = _broken_off(preset("oakforest-like", nodes=4))
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

    return play(platform, act)
