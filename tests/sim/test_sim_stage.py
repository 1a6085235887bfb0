"""Transfers on a platform take the time that the model of the network says, to the last digits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_rig import Transfers, ends
from simgrid_reference import simgrid_ends_s

from simgrid_here import needs_simgrid
from tatami.cluster import Cluster, Link, Processor
from tatami.sim.flows import Flow, Flows, Lane, LinkPath, rates_of
from tatami.sim.platforms import RDMA, TCP, AbstractPlatform, ClusterPlatform, Fabric, MachineGroup, Tree, Wire, preset
from tatami.sim.stage import Going, Stage, play

MB = 1e6


def two_clusters(fabric: Fabric, *, duplex: bool = True) -> Tree:
    """Two clusters of two hosts: 100 MB/s links, 150 MB/s backbones, 120 MB/s between."""
    node = MachineGroup(
        name="node", count=2, link=Wire(bandwidth_bytes_per_s=100 * MB, latency_s=1e-3, duplex=duplex), speed_flop_per_s=10
    )
    backbone = Wire(bandwidth_bytes_per_s=150 * MB, latency_s=2e-3)
    return Tree(
        name="two",
        backbone=Wire(bandwidth_bytes_per_s=120 * MB, latency_s=4e-3),
        groups=(MachineGroup(name="cluster", count=2, backbone=backbone, groups=(node,)),),
        fabric=fabric,
    )


def test_one_transfer_is_latency_and_bytes_by_bandwidth() -> None:
    found = ends(Transfers(platform=two_clusters(RDMA), sends=((0, 2, 50 * MB),)))
    assert found.times[("send", 0)] == pytest.approx(2 * (1e-3 + 2e-3) + 4e-3 + 50 / 100, rel=1e-9)
    assert found.bytes_moved == 50 * MB


def test_inside_a_cluster_a_transfer_does_not_go_outside() -> None:
    found = ends(Transfers(platform=two_clusters(RDMA), sends=((0, 1, 50 * MB),)))
    assert found.times[("send", 0)] == pytest.approx(2 * 1e-3 + 2e-3 + 50 / 100, rel=1e-9)


def test_transfers_share_what_they_both_pass() -> None:
    found = ends(Transfers(platform=two_clusters(RDMA), sends=((0, 2, 60 * MB), (1, 3, 60 * MB))))
    assert found.times[("send", 0)] == pytest.approx(0.01 + 60 / 60, rel=1e-9)  # 120 MB/s between the clusters, for two
    assert found.times[("send", 1)] == found.times[("send", 0)]


def test_tcp_takes_its_factors() -> None:
    """LV08: latency times 13.01, bandwidth times 0.97; acknowledgements take 5 % of a link that both ways share."""
    found = ends(Transfers(platform=two_clusters(TCP, duplex=False), sends=((0, 2, 50 * MB),)))
    assert found.times[("send", 0)] == pytest.approx(13.01 * 0.01 + 1.05 * 50 / (0.97 * 100), rel=1e-9)


def two_machines() -> Cluster:
    """Three ranks on a, two on b."""
    processors = tuple(Processor(name=f"p{rank}", speed=10.0, host=host) for rank, host in enumerate("aaabb"))
    local = Link(bandwidth_bytes_per_s=300 * MB, latency_s=1e-4)
    return Cluster(processors=processors, local=local, network=Link(bandwidth_bytes_per_s=100 * MB, latency_s=1e-2))


def test_transfers_inside_a_machine_have_the_link_to_themselves() -> None:
    """Transfers to other machines share the network as if those inside were not there."""
    inside = ((0, 1, 50 * MB), (1, 2, 31 * MB), (0, 1, 7.0), (3, 4, 90 * MB))
    across = ((0, 3, 20 * MB), (1, 4, 20 * MB))
    platform = ClusterPlatform(cluster=two_machines())
    found = ends(Transfers(platform=platform, sends=inside + across, waits=(0.05, 0.25)))
    expected_s = [1e-4 + size_bytes / (300 * MB) for _, _, size_bytes in inside] + [0.01 + 20 / 50] * 2
    assert [found.times[("send", index)] for index in range(6)] == pytest.approx(expected_s, rel=1e-8)
    assert [found.times[key] for key in (("wait", 0), ("wait", 1))] == [0.05, 0.25]
    assert found.bytes_moved == sum(size_bytes for _, _, size_bytes in inside + across)


def probed_machines() -> Cluster:
    """Three machines, between which latencies were measured: 1 ms and 9 ms."""
    processors = tuple(Processor(name=f"p{rank}", speed=10.0, host=host) for rank, host in enumerate("abc"))
    links = {("a", "b"): 1e-3, ("a", "c"): 9e-3, ("b", "c"): 1e-3}
    return Cluster(
        processors=processors,
        local=Link(bandwidth_bytes_per_s=300 * MB, latency_s=0.0),
        network=Link(bandwidth_bytes_per_s=100 * MB, latency_s=1e-3),
        links={hosts: Link(bandwidth_bytes_per_s=100 * MB, latency_s=latency_s) for hosts, latency_s in links.items()},
    )


def test_what_was_measured_to_be_nearer_gets_no_more_of_a_link() -> None:
    """Both leave a, which has 100 MB/s: 0.8 MB of the first are gone when the other begins, and then each has a half."""
    sends = ((0, 1, 50 * MB), (0, 2, 50 * MB))
    platform = ClusterPlatform(cluster=probed_machines())
    found = ends(Transfers(platform=platform, sends=sends, waits=(0.5,)))
    first_s = 9e-3 + 2 * (50 - 0.8) / 100
    assert found.times[("send", 0)] == pytest.approx(first_s, rel=1e-8)
    assert found.times[("send", 1)] == pytest.approx(first_s + 0.8 / 100, rel=1e-8)
    assert found.times[("wait", 0)] == pytest.approx(0.5, rel=1e-8)
    assert found.bytes_moved == 100 * MB


LATE = -1.0
"""Noted where a transfer has ended."""


@pytest.mark.parametrize(
    ("machines", "transfers", "expected"),
    [
        pytest.param(probed_machines, ((50, 1e-3 + 5 / 100), (50, 5e-4)), [5 * MB, 0.0], id="between probed machines"),
        pytest.param(
            two_machines,
            ((50, 1e-4 + 5 / 300), (30, 1.0), (20, 5e-5)),
            [5 * MB, LATE, 30 * MB, 0.0],
            id="inside a machine",
        ),
    ],
)
def test_a_transfer_can_be_broken_off(
    machines: Callable[[], Cluster], transfers: Sequence[tuple[float, float]], expected: list[float]
) -> None:
    """After 5 of 50 MB, after its end, and before its first byte: each of so many MB, one after the other."""
    moved: list[float] = []

    def act(stage: Stage) -> Callable[[], list[float]]:
        def one(number: int) -> None:
            if number == len(transfers):
                return
            size, at_s = transfers[number]
            before = stage.bytes_moved
            going = stage.send(0, 1, size_bytes=size * MB, then=lambda: moved.append(LATE))

            def broken() -> None:
                stage.cancel(going)
                moved.append(stage.bytes_moved - before)
                one(number + 1)

            stage.after(at_s, broken)

        one(0)
        return lambda: moved

    assert play(ClusterPlatform(cluster=machines()), act) == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_what_ends_together_is_told_in_an_order() -> None:
    """Transfers of both kinds, and timers between them, in the order in which they were started."""
    cluster = replace(two_machines(), network=Link(bandwidth_bytes_per_s=100 * MB, latency_s=0.0))
    plain = replace(cluster, local=Link(bandwidth_bytes_per_s=100 * MB, latency_s=0.0))
    sends = ((0, 3, 300 * MB), (1, 2, 300 * MB), (4, 0, 300 * MB), (0, 1, 300 * MB))
    found = ends(Transfers(platform=ClusterPlatform(cluster=plain), sends=sends, waits=(3.0, 1.0, 2.0, 3.0)))
    assert [(what, index) for what, index, _ in found.log[:2]] == [("wait", 1), ("wait", 2)]
    assert [(what, index) for what, index, _ in found.log[2:]] == [
        *(("send", index) for index in range(4)),
        ("wait", 0),
        ("wait", 3),
    ]
    assert [round(at_s, 9) for _, _, at_s in found.log] == [1.0, 2.0] + [3.0] * 6


def test_what_ended_just_now_can_be_broken_off() -> None:
    assert _first_of_two(two_clusters(RDMA)) == [0]


def _first_of_two(platform: AbstractPlatform) -> list[int]:
    told: list[int] = []

    def act(stage: Stage) -> Callable[[], list[int]]:
        going: list[Going] = []

        def ended(index: int) -> None:
            told.append(index)
            stage.cancel(going[1 - index])

        for index in (0, 1):
            going.append(stage.send(index, 2 + index, size_bytes=60 * MB, then=lambda index=index: ended(index)))  # type: ignore[misc]
        return lambda: told

    return play(platform, act)


def test_one_pull_of_the_papers_system() -> None:
    """21.67 s to 0.1 s (golden: what SimGrid 4.1 says); every worker's takes as long."""
    platform = preset("paper-server-10k", nodes=200)
    found = ends(Transfers(platform=platform, sends=tuple((200 + w % 100, w, 1e9) for w in range(200))))
    assert list(found.times.values()) == pytest.approx([21.676155036082] * 200, abs=1e-9)
    assert max(found.times.values()) == pytest.approx(21.67, abs=0.1)


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
    first_s, second_bytes = _broken_off_and_cancelled(preset("oakforest-like", nodes=4))
    assert first_s == pytest.approx(0.04 + 0.75e9 / 12.5e9 + 5e-7, rel=1e-9)
    assert second_bytes == pytest.approx(0.25e9, rel=1e-9)


def _broken_off_and_cancelled(platform: AbstractPlatform) -> tuple[float, float]:
    def act(stage: Stage) -> Callable[[], tuple[float, float]]:
        ended: list[float] = []
        stage.send(0, 1, size_bytes=1e9, then=lambda: ended.append(stage.now_s))
        second, third = (stage.send(0, target, size_bytes=1e9, then=lambda: ended.append(0.0)) for target in (2, 3))
        stage.cancel(third)
        stage.after(5e-7 + 0.04, lambda: stage.cancel(second))
        return lambda: (ended[0], stage.bytes_moved - 1e9)

    return play(platform, act)
