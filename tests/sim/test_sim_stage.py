"""Activities on a platform take the time that the model of the network says, to the last digits."""

from __future__ import annotations

import os

import pytest
from sim_rig import Ends, Transfers, call, ends, started

from simgrid_here import needs_simgrid
from tatami.errors import SimulationError
from tatami.sim.platforms import RDMA, TCP, Fabric, Group, Tree, Wire, preset
from tatami.sim.processes import Runs

MB = 1e6


def two_clusters(fabric: Fabric, *, duplex: bool = True) -> Tree:
    """Two clusters of two hosts: 100 MB/s links, 150 MB/s backbones, 120 MB/s between."""
    node = Group(
        name="node", count=2, link=Wire(bandwidth_bytes_per_s=100 * MB, latency_s=1e-3, duplex=duplex), speed_flop_per_s=10
    )
    backbone = Wire(bandwidth_bytes_per_s=150 * MB, latency_s=2e-3)
    return Tree(
        name="two",
        backbone=Wire(bandwidth_bytes_per_s=120 * MB, latency_s=4e-3),
        groups=(Group(name="cluster", count=2, backbone=backbone, groups=(node,)),),
        fabric=fabric,
    )


@needs_simgrid
def test_one_transfer_is_latency_and_bytes_by_bandwidth() -> None:
    found = call(ends, Transfers(platform=two_clusters(RDMA), sends=((0, 2, 50 * MB),)))
    assert found.times[("send", 0)] == pytest.approx(2 * (1e-3 + 2e-3) + 4e-3 + 50 / 100, rel=1e-9)
    assert found.bytes_moved == 50 * MB


@needs_simgrid
def test_inside_a_cluster_a_transfer_does_not_go_outside() -> None:
    found = call(ends, Transfers(platform=two_clusters(RDMA), sends=((0, 1, 50 * MB),)))
    assert found.times[("send", 0)] == pytest.approx(2 * 1e-3 + 2e-3 + 50 / 100, rel=1e-9)


@needs_simgrid
def test_transfers_share_what_they_both_pass() -> None:
    found = call(ends, Transfers(platform=two_clusters(RDMA), sends=((0, 2, 60 * MB), (1, 3, 60 * MB))))
    assert found.times[("send", 0)] == pytest.approx(0.01 + 60 / 60, rel=1e-9)  # 120 MB/s between the clusters, for two
    assert found.times[("send", 1)] == found.times[("send", 0)]


@needs_simgrid
def test_tcp_takes_its_factors() -> None:
    """LV08: latency times 13.01, bandwidth times 0.97; acknowledgements take 5 % of a link that both ways share."""
    found = call(ends, Transfers(platform=two_clusters(TCP, duplex=False), sends=((0, 2, 50 * MB),)))
    assert found.times[("send", 0)] == pytest.approx(13.01 * 0.01 + 1.05 * 50 / (0.97 * 100), rel=1e-9)


@needs_simgrid
def test_computing_shares_a_host() -> None:
    found = call(ends, Transfers(platform=two_clusters(RDMA), computes=((0, 100.0), (1, 100.0), (1, 100.0))))
    assert [found.times[("compute", index)] for index in range(3)] == pytest.approx([10, 20, 20], rel=1e-9)


@needs_simgrid
def test_what_ends_together_is_told_in_an_order() -> None:
    """More at once than `_FEW`, of all kinds, and timers between them."""
    work = tuple((host, 10.0) for host in (3, 1, 0, 2))
    found = call(ends, Transfers(platform=two_clusters(RDMA), computes=work * 3, waits=(3.0, 1.0, 2.0, 3.0)))
    expected = [("wait", 1), ("wait", 2), ("wait", 0), ("wait", 3)] + [("compute", index) for index in range(12)]
    assert [(what, index) for what, index, _ in found.log] == expected
    assert [round(at_s, 9) for _, _, at_s in found.log] == [1.0, 2.0] + [3.0] * 14


@needs_simgrid
def test_one_pull_of_the_papers_system() -> None:
    """21.67 s to 0.1 s (golden: SimGrid 4.1 says this to the last digit); every worker's takes as long."""
    platform = preset("paper-server-10k", nodes=200)
    found = call(ends, Transfers(platform=platform, sends=tuple((200 + w % 100, w, 1e9) for w in range(200))))
    assert list(found.times.values()) == pytest.approx([21.676155036082] * 200, abs=1e-9)
    assert max(found.times.values()) == pytest.approx(21.67, abs=0.1)


@needs_simgrid
def test_a_run_that_fails_says_so() -> None:
    with pytest.raises(IndexError):
        call(ends, Transfers(platform=two_clusters(RDMA), sends=((0, 99, 1.0),)))


def _dies(_: int) -> Ends:
    os.write(2, b"what it said last")
    os._exit(7)


@needs_simgrid
def test_a_process_that_dies_is_reported_with_its_last_words() -> None:
    with Runs(cores=1) as own, pytest.raises(SimulationError, match=r"exit code 7; it said: what it said last"):
        own.call(_dies, 0)


@needs_simgrid
def test_a_run_past_its_time_is_ended() -> None:
    with Runs(cores=1) as own, pytest.raises(SimulationError, match=r"longer than 0\.2 s"):
        own.call(_hangs, 0, timeout_s=0.2)


def _hangs(_: int) -> None:
    import time

    time.sleep(60)


@needs_simgrid
def test_the_same_on_one_core_or_two() -> None:
    jobs = [Transfers(platform=two_clusters(TCP), sends=((0, 2, size * MB), (1, 3, 7 * MB))) for size in range(1, 7)]
    told: list[int] = []
    two = started().map(ends, jobs, done=lambda index, _: told.append(index))
    with Runs(cores=1) as own:
        one = own.map(ends, jobs)
    assert [each.log for each in one] == [each.log for each in two]
    assert sorted(told) == list(range(6))
