"""Transfers on a platform take the time that the model of the network says, to the last digits."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from sim_rig import Transfers, ends

from tatami.cluster import Cluster, Link, Processor
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


def test_a_transfer_between_probed_machines_can_be_broken_off() -> None:
    assert _broken_off_late(ClusterPlatform(cluster=probed_machines())) == pytest.approx([5 * MB, 0.0], rel=1e-6, abs=1e-3)


def _broken_off_late(platform: AbstractPlatform) -> list[float]:
    """Bytes moved by two transfers: one broken off after 5 of 50 MB, one while its latency lasts."""
    moved: list[float] = []

    def act(stage: Stage) -> Callable[[], list[float]]:
        def one(number: int) -> None:
            before, at_s = stage.bytes_moved, (1e-3 + 5 / 100, 5e-4)[number]
            going = stage.send(0, 1, size_bytes=50 * MB, then=lambda: moved.append(-1.0))

            def broken() -> None:
                stage.cancel(going)
                moved.append(stage.bytes_moved - before)
                if number == 0:
                    one(1)

            stage.after(at_s, broken)

        one(0)
        return lambda: moved

    return play(platform, act)


def test_a_transfer_inside_a_machine_can_be_broken_off() -> None:
    found = _broken_off(ClusterPlatform(cluster=two_machines()))
    assert found == pytest.approx([5 * MB, 30 * MB, 0.0], rel=1e-6, abs=1e-3)


def _broken_off(platform: AbstractPlatform) -> list[float]:
    """Bytes moved by three transfers: one broken off after 5 of 50 MB, one that has ended, one before its first byte."""
    moved: list[float] = []

    def act(stage: Stage) -> Callable[[], list[float]]:
        def one(number: int) -> None:
            if number == 3:
                return
            size_bytes = (50 * MB, 30 * MB, 20 * MB)[number]
            at_s = (1e-4 + 5 / 300, 1.0, 5e-5)[number]
            before = stage.bytes_moved
            going = stage.send(0, 1, size_bytes=size_bytes, then=lambda: None)

            def broken() -> None:
                stage.cancel(going)
                moved.append(stage.bytes_moved - before)
                one(number + 1)

            stage.after(at_s, broken)

        one(0)
        return lambda: moved

    return play(platform, act)


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
