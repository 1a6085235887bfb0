"""Activities on a platform take the time that the model of the network says, to the last digits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from sim_rig import Ends, LeftToSimGrid, Transfers, call, ends, started

from simgrid_here import needs_simgrid
from tatami.cluster import Cluster, Link, Processor
from tatami.errors import ClusterError, SimulationError
from tatami.sim import waiting
from tatami.sim.engine import simgrid
from tatami.sim.platforms import RDMA, TCP, AbstractPlatform, ClusterPlatform, Fabric, MachineGroup, Tree, Wire, preset
from tatami.sim.platforms.base import PlatformPart
from tatami.sim.processes import Runs
from tatami.sim.stage import Going, Stage, built, play

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


def two_machines() -> Cluster:
    """Three ranks on a, two on b."""
    processors = tuple(Processor(name=f"p{rank}", speed=10.0, host=host) for rank, host in enumerate("aaabb"))
    local = Link(bandwidth_bytes_per_s=300 * MB, latency_s=1e-4)
    return Cluster(processors=processors, local=local, network=Link(bandwidth_bytes_per_s=100 * MB, latency_s=1e-2))


@needs_simgrid
def test_transfers_inside_a_machine_have_the_link_to_themselves() -> None:
    """As SimGrid says of each alone; beside them transfers share the network as if they were not there, which SimGrid slows."""
    inside = ((0, 1, 50 * MB), (1, 2, 31 * MB), (0, 1, 7.0), (3, 4, 90 * MB))
    across = ((0, 3, 20 * MB), (1, 4, 20 * MB))
    for kind in (ClusterPlatform, LeftToSimGrid):
        found = call(ends, Transfers(platform=kind(cluster=two_machines()), sends=inside, waits=(0.05,)))
        for index, (_, _, size_bytes) in enumerate(inside):
            assert found.times[("send", index)] == pytest.approx(1e-4 + size_bytes / (300 * MB), rel=1e-8)
    platform = ClusterPlatform(cluster=two_machines())
    found = call(ends, Transfers(platform=platform, sends=inside + across, computes=((0, 1.5),), waits=(0.05, 0.25)))
    expected_s = [1e-4 + size_bytes / (300 * MB) for _, _, size_bytes in inside] + [0.01 + 20 / 50] * 2
    assert [found.times[("send", index)] for index in range(6)] == pytest.approx(expected_s, rel=1e-8)
    assert [found.times[key] for key in (("compute", 0), ("wait", 0), ("wait", 1))] == pytest.approx(
        [0.15, 0.05, 0.25], rel=1e-8
    )
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


@needs_simgrid
@pytest.mark.parametrize("meet_few", [False, True])
def test_what_was_measured_to_be_nearer_gets_no_more_of_a_link(meet_few: bool) -> None:
    """Both leave a, which has 100 MB/s: 0.8 MB of the first are gone when the other begins, and then each has a half."""
    sends = ((0, 1, 50 * MB), (0, 2, 50 * MB))
    platform = ClusterPlatform(cluster=probed_machines())
    found = call(ends, Transfers(platform=platform, sends=sends, waits=(0.5,), meet_few=meet_few))
    first_s = 9e-3 + 2 * (50 - 0.8) / 100
    assert found.times[("send", 0)] == pytest.approx(first_s, rel=1e-8)
    assert found.times[("send", 1)] == pytest.approx(first_s + 0.8 / 100, rel=1e-8)
    assert found.times[("wait", 0)] == pytest.approx(0.5, rel=1e-8)
    assert found.bytes_moved == 100 * MB


@needs_simgrid
def test_a_transfer_between_probed_machines_can_be_broken_off() -> None:
    assert call(_broken_off_late, ClusterPlatform(cluster=probed_machines())) == pytest.approx(
        [5 * MB, 0.0], rel=1e-6, abs=1e-3
    )


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


@needs_simgrid
def test_a_transfer_inside_a_machine_can_be_broken_off() -> None:
    found, expected = (call(_broken_off, kind(cluster=two_machines())) for kind in (ClusterPlatform, LeftToSimGrid))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-3)
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


@needs_simgrid
def test_computing_shares_a_host() -> None:
    found = call(ends, Transfers(platform=two_clusters(RDMA), computes=((0, 100.0), (1, 100.0), (1, 100.0))))
    assert [found.times[("compute", index)] for index in range(3)] == pytest.approx([10, 20, 20], rel=1e-9)


@needs_simgrid
def test_what_ends_together_is_told_in_an_order() -> None:
    """More at once than are asked for one by one, of all kinds, and timers between them."""
    work = tuple((host, 10.0) for host in (3, 1, 0, 2))
    found = call(ends, Transfers(platform=two_clusters(RDMA), computes=work * 3, waits=(3.0, 1.0, 2.0, 3.0)))
    expected = [("wait", 1), ("wait", 2), ("wait", 0), ("wait", 3)] + [("compute", index) for index in range(12)]
    assert [(what, index) for what, index, _ in found.log] == expected
    assert [round(at_s, 9) for _, _, at_s in found.log] == [1.0, 2.0] + [3.0] * 14


@dataclass(frozen=True, kw_only=True)
class Crowded:
    """So many transfers, of which more than `many` are waited for by several; the run may fail at a time."""

    platform: AbstractPlatform
    num: int
    many: int
    fails_at_s: float | None = None


def crowd_ends(crowded: Crowded) -> list[tuple[int, float]]:
    """Transfers of four sizes; each that ends breaks off the one after it, and every tenth starts another; timers between."""
    waiting.MANY, waiting.SHARE = crowded.many, crowded.many // 2
    found: list[tuple[int, float]] = []

    def act(stage: Stage) -> Callable[[], list[tuple[int, float]]]:
        going: dict[int, Going] = {}

        def ended(index: int) -> None:
            found.append((index, stage.now_s))
            if index + 1 in going:
                stage.cancel(going[index + 1])
            if index % 10 == 0:
                start(index + crowded.num)

        def start(index: int) -> None:
            source, size_bytes = index % 4, (1 + index % 3) * MB
            going[index] = stage.send(source, (source + 1 + index % 3) % 4, size_bytes=size_bytes, then=lambda: ended(index))

        def fail() -> None:
            raise ValueError(f"at {stage.now_s:g}")

        for index in range(crowded.num):
            start(index)
        for index in range(8):
            stage.compute(index % 4, work_flop=1000.0, then=lambda: found.append((-3, stage.now_s)))  # are broken off at 5 s
        for tick in range(1, 20):
            stage.at(tick / 7, lambda: found.append((-1, stage.now_s)))
        stage.at(5.0, stage.clear)
        if crowded.fails_at_s is not None:
            stage.at(crowded.fails_at_s, fail)
        return lambda: [*found, (-2, stage.now_s)]

    return play(crowded.platform, act)


@needs_simgrid
def test_it_is_the_same_whoever_waits() -> None:
    """What ends when, and in which order, with one actor that waits, and with several for more than ten activities."""
    alone, together = (call(crowd_ends, Crowded(platform=two_clusters(RDMA), num=60, many=many)) for many in (waiting.MANY, 10))
    assert alone == together
    assert [index for index, _ in alone].count(-1) == 19
    assert sum(index >= 60 for index, _ in alone) > 5
    assert -3 not in {index for index, _ in alone}
    assert alone[-1] == (-2, 5.0)


@needs_simgrid
def test_several_that_wait_end_with_the_run() -> None:
    with pytest.raises(ValueError, match=r"at 0\.5"):
        call(crowd_ends, Crowded(platform=two_clusters(RDMA), num=60, many=10, fails_at_s=0.5))


@needs_simgrid
@pytest.mark.parametrize(("many", "share"), [(100, 100), (4, 2), (4, 100)])
def test_a_transfer_that_fails_is_not_taken_for_one_that_ended(many: int, share: int) -> None:
    with pytest.raises(SimulationError, match=r"after 0\.1 simulated seconds a link went down"):
        call(_with_a_link_that_goes_down, (many, share))


def _with_a_link_that_goes_down(limits: tuple[int, int]) -> None:
    waiting.MANY, waiting.SHARE = limits

    def act(stage: Stage) -> Callable[[], None]:
        for index in range(8):
            stage.send(index % 4, (index + 1) % 4, size_bytes=50 * MB, then=lambda: None)
        stage.at(0.1, simgrid().Link.by_name("cluster0/node1/link_UP").turn_off)
        return lambda: None

    play(two_clusters(RDMA), act)


@needs_simgrid
def test_what_ended_just_now_can_be_broken_off() -> None:
    assert call(_first_of_two, two_clusters(RDMA)) == [0]


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
@pytest.mark.parametrize("is_built_before", [False, True])
def test_a_run_past_its_time_is_ended(is_built_before: bool, tmp_path: Path) -> None:
    """With all processes that were there for its sake."""
    built_before = (lambda _: two_clusters(RDMA)) if is_built_before else None
    with Runs(cores=1) as own:
        own.map(_cores, [0], platform=built_before)  # so that the process that starts runs is up
        for timeout_s in (1, 10, 100):  # until the run has begun
            with pytest.raises(SimulationError, match=rf"longer than {timeout_s} s"):
                own.map(_hangs, [tmp_path], timeout_s=timeout_s, platform=built_before)
            if (tmp_path / "pids").exists():
                break
    pids = (tmp_path / "pids").read_text(encoding="utf-8").split()
    limit_s = time.monotonic() + 800
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < limit_s, f"of the processes {pids} some live on"
        time.sleep(0.01)


def _hangs(folder: Path) -> None:
    (folder / "part").write_text(f"{os.getpid()} {os.getppid()}", encoding="utf-8")
    (folder / "part").rename(folder / "pids")
    time.sleep(1000)


def _is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@needs_simgrid
def test_the_same_on_one_core_or_two() -> None:
    jobs = [Transfers(platform=two_clusters(TCP), sends=((0, 2, size * MB), (1, 3, 7 * MB))) for size in range(1, 7)]
    told: list[int] = []
    two = started().map(ends, jobs, done=lambda index, _: told.append(index))
    with Runs(cores=1) as own:
        one = own.map(ends, jobs)
    assert [each.log for each in one] == [each.log for each in two]
    assert sorted(told) == list(range(6))


@needs_simgrid
def test_a_platform_is_built_once_for_all_its_runs() -> None:
    """Runs in processes that begin with it built find what they find where each builds its own; another comes between."""
    platforms = (two_clusters(TCP), two_clusters(RDMA), two_clusters(TCP))
    jobs = [Transfers(platform=platform, sends=((0, 2, size * MB),)) for platform in platforms for size in range(1, 5)]
    with Runs(cores=1) as own:
        found = own.map(ends, jobs, platform=lambda job: job.platform)
        seen = own.map(_built_before, jobs, platform=lambda job: job.platform)
    assert [each.log for each in found] == [each.log for each in started().map(ends, jobs)]
    assert [was_built for _, was_built in seen] == [True] * 12
    assert [seen.count(each) for each in seen] == [4] * 12  # three processes have built one each


def _built_before(transfers: Transfers) -> tuple[int, bool]:
    return os.getppid(), built() == transfers.platform


@dataclass(frozen=True, kw_only=True)
class Ruin(AbstractPlatform):
    """Cannot be built."""

    dies: bool
    name: str = "ruin"
    fabric: Fabric = RDMA

    @property
    def hosts(self) -> tuple[str, ...]:
        return ("host",)

    @property
    def parts(self) -> tuple[PlatformPart, ...]:
        return ()

    def build(self, engine: object) -> list[object]:  # noqa: ARG002 -- the name is the interface's
        if self.dies:
            _dies(0)
        raise ClusterError("no stone on another")


@needs_simgrid
@pytest.mark.parametrize(
    ("dies", "kind", "words"),
    [(False, ClusterError, "no stone"), (True, SimulationError, r"exit code 7; it said: (?s:.*)what it said")],
)
def test_a_platform_that_cannot_be_built_fails_its_runs(dies: bool, kind: type[Exception], words: str) -> None:
    jobs = [Transfers(platform=Ruin(dies=dies))] * 2
    with Runs(cores=1) as own:
        for _ in range(2):
            with pytest.raises(kind, match=words):
                own.map(ends, jobs, platform=lambda job: job.platform)
        assert own.map(_built_before, [Transfers(platform=two_clusters(RDMA))], platform=lambda job: job.platform)[0][1]


@needs_simgrid
def test_a_run_stays_on_one_of_the_cores() -> None:
    """Of those that this process may use, which keeps them all."""
    before = os.sched_getaffinity(0)
    core = call(_cores, 0)
    assert len(core) == 1
    assert core <= before
    assert os.sched_getaffinity(0) == before


def _cores(_: int) -> set[int]:
    return os.sched_getaffinity(0)
