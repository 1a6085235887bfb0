"""Speeds of clusters, and the cores that a process may use."""

import copy
import math
import os
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tatami.cluster import (
    Cluster,
    Link,
    Processor,
    SpeedTable,
    check_speeds,
    cluster_toml,
    fastest,
    listed_speeds,
    parse_speeds,
    read_cluster,
    speed_at,
)
from tatami.cluster.cores import base_here, memory_here, quota_here
from tatami.errors import ClusterError
from tatami.lab.plan import plan_lab
from tatami.retiling import Controller, Retiler
from tatami.tiling import plan
from tatami.units import parse_flop
from tatami.workload import Workload


def test_speeds() -> None:
    assert parse_speeds("1,1.5, 2") == (1.0, 1.5, 2.0)
    assert parse_speeds("10 Gflop/s,2e9", expected=2) == (1e10, 2e9)


@given(st.lists(st.floats(1e-12, 9e5), min_size=1, max_size=8) | st.lists(st.floats(1e6, 1e24), min_size=1, max_size=8))
def test_speeds_come_back(speeds: list[float]) -> None:
    assert parse_speeds(",".join(map(repr, speeds)), expected=len(speeds)) == tuple(speeds)
    check_speeds(speeds, expected=len(speeds))


def test_all_faults_of_a_list_at_once() -> None:
    with pytest.raises(ClusterError) as caught:
        parse_speeds("1,,-2,nan,x,0,inf", expected=3)
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "speeds[1]: is missing",
        "speeds[2]: must be > 0, not -2",
        "speeds[3]: must be a finite number > 0, not nan",
        "speeds[4]: 'x' is not a computing speed",
        "speeds[5]: must be > 0, not 0",
        "speeds[6]: must be a finite number > 0, not inf",
        "speeds: 7 given, expected 3, one for each rank",
    ]
    assert str(caught.value).startswith("--speeds '1,,-2,nan,x,0,inf' cannot be used; write numbers > 0")


@pytest.mark.parametrize("text", ["", "  "])
def test_no_speeds(text: str) -> None:
    with pytest.raises(ClusterError, match="speeds: there is none"):
        parse_speeds(text, expected=2)


def test_numbers_are_checked_alike() -> None:
    with pytest.raises(ClusterError) as caught:
        check_speeds([1.0, -1.0, float("nan")], expected=4)
    assert caught.value.problems == (
        "speeds[1]: must be > 0, not -1",
        "speeds[2]: must be a finite number > 0, not nan",
        "speeds: 3 given, expected 4, one for each rank",
    )


def test_speeds_may_be_whatever_holds_numbers_in_an_order() -> None:
    table = SpeedTable([(1.0, 1.0), (2.0, 1.5)])
    assert listed_speeds((1, np.float32(2.0), Fraction(1, 2), np.array(3))) == (1.0, 2.0, 0.5, 3.0)
    assert listed_speeds(np.array([1.0, 2.0])) == listed_speeds(range(1, 3)) == (1.0, 2.0)
    assert listed_speeds([1.0, table])[1] is table


@pytest.mark.parametrize(
    ("speeds", "told"),
    [
        ({1.0, 2.0}, ", not {1.0, 2.0}"),
        ("12", ", not '12'"),
        (np.array(1.0), ", not array(1.)"),
        (np.ones((1, 1)), "; speeds[0] must be a number > 0, not array([1.])"),
        ([1.0, 10**400], "; speeds[1] must be a finite number > 0, not inf"),
        ([1e-30], "; speeds[0] must be from 1e-12 to 1e+24, not 1e-30"),
    ],
)
def test_what_holds_no_speeds_is_told_what_would(speeds: Any, told: str) -> None:
    with pytest.raises(ClusterError) as caught:
        listed_speeds(speeds)
    assert str(caught.value) == f"speeds must be a number > 0 for each rank{told}"


def test_a_cluster_names_all_its_faults() -> None:
    link = Link(bandwidth_bytes_per_s=1.0, latency_s=0.0)
    with pytest.raises(ClusterError) as caught:
        Cluster(processors=(Processor(name="a", speed=0), Processor(name="a", speed=1)), links={("b", "a"): link})
    assert caught.value.problems == (
        "processors[0].speed: must be > 0, not 0 (a)",
        "processors[1].name: 'a' is taken already",
        "links['b', 'a']: the hosts must be in sorted order",
    )
    with pytest.raises(ClusterError, match="processors: there is none"):
        Cluster(processors=())


@pytest.mark.parametrize(
    ("bandwidth", "latency", "name"), [(0.0, 0.0, "bandwidth"), (1.0, -1.0, "latency"), (float("inf"), 0.0, "bandwidth")]
)
def test_a_link_that_cannot_be(bandwidth: float, latency: float, name: str) -> None:
    with pytest.raises(ClusterError, match=f"the {name} of a link must be a finite number"):
        Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def test_the_least_of_the_groups_above_counts(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/a/b\n", encoding="ascii")
    assert quota_here(groups=groups, own=own) is None
    write(groups / "a" / "b" / "cpu.max", "max 100000")
    assert quota_here(groups=groups, own=own) is None
    write(groups / "a" / "cpu.max", "50000 100000")
    assert quota_here(groups=groups, own=own) == pytest.approx(0.5)
    write(groups / "cpu.max", "150000 100000")
    assert quota_here(groups=groups, own=own) == pytest.approx(0.5)
    own.write_text("0::/\n", encoding="ascii")
    assert quota_here(groups=groups, own=own) == pytest.approx(1.5)


def test_groups_of_the_older_version(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("5:memory:/m\n4:cpu,cpuacct:/a\n3:cpuset:/c\n0::/\n", encoding="ascii")
    write(groups / "cpu" / "cpu.cfs_quota_us", "-1")
    write(groups / "cpu" / "cpu.cfs_period_us", "100000")
    assert quota_here(groups=groups, own=own) is None
    write(groups / "cpu" / "a" / "cpu.cfs_quota_us", "25000")
    write(groups / "cpu" / "a" / "cpu.cfs_period_us", "100000")
    assert quota_here(groups=groups, own=own) == pytest.approx(0.25)


def test_where_there_are_no_control_groups(tmp_path: Path) -> None:
    assert quota_here(groups=tmp_path, own=tmp_path / "none") is None


def test_memory_is_the_least_of_the_groups_above_and_the_machine(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    machine = memory_here(groups=groups, own=own)
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own.write_text("0::/a/b\n", encoding="ascii")
    write(groups / "a" / "b" / "memory.max", "max")
    assert memory_here(groups=groups, own=own) == machine
    write(groups / "a" / "memory.max", "300000000")
    assert memory_here(groups=groups, own=own) == 300_000_000
    write(groups / "a" / "b" / "memory.max", "200000000")
    assert memory_here(groups=groups, own=own) == 200_000_000
    write(groups / "memory.max", str(10**18))
    own.write_text("0::/\n", encoding="ascii")
    assert memory_here(groups=groups, own=own) == machine


def test_memory_of_groups_of_the_older_version(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("5:memory:/m/n\n4:cpu,cpuacct:/a\n0::/\n", encoding="ascii")
    machine = memory_here(groups=groups, own=tmp_path / "none")
    write(groups / "memory" / "m" / "n" / "memory.limit_in_bytes", str(2**63 - 4096))  # what it is where there is none
    assert memory_here(groups=groups, own=own) == machine
    write(groups / "memory" / "memory.limit_in_bytes", "400000000")  # of a container, whose own group is at the top
    assert memory_here(groups=groups, own=own) == 400_000_000


def test_what_a_process_has_taken() -> None:
    before = base_here()
    page = os.sysconf("SC_PAGE_SIZE")
    held = bytearray(64 << 20)
    held[::page] = b"1" * len(held[::page])
    # What else the process gives back meanwhile is far less.
    assert base_here() > before + (48 << 20) > 48 << 20


TABLE = SpeedTable([(400.0, 2.0), (100.0, 1.0)])
GPU = Cluster(processors=(Processor(name="gpu", speed=TABLE, host="a"), Processor(name="cpu", speed=1.0, host="b")))


def test_it_is_the_number_at_its_largest_size() -> None:
    assert SpeedTable([(100, 1), (400, 2)]) == TABLE
    assert TABLE != 2.0
    assert float(TABLE) == 2.0
    assert TABLE > 1.5
    assert fastest(SpeedTable([(1.0, 9.0), (100.0, 4.0)])) == 9.0
    assert (speed_at(3.0, 7.0), speed_at(TABLE, 100.0)) == (3.0, 1.0)


def test_time_is_a_straight_line_between_sizes_and_the_speed_stays_outside() -> None:
    # 100 take 100, 400 take 200: 250 take 150.
    assert [TABLE.at(size) for size in (1, 100, 250, 400, math.inf)] == pytest.approx([1.0, 1.0, 250 / 150, 2.0, 2.0])
    assert [TABLE.size_in(time) for time in (50, 100, 150, 200, 300)] == pytest.approx([50, 100, 250, 400, 600])
    assert TABLE.scaled(size=2.0, speed=3.0) == SpeedTable([(200, 3), (800, 6)])


@given(steps=st.lists(st.tuples(st.floats(0.01, 1e3), st.floats(0.0, 1e3)), min_size=2, max_size=10), size=st.floats(1e-3, 1e4))
@example(steps=[(1.0, 0.0), (32.0, 1.5), (28.0, 0.0)], size=47.0)
def test_a_larger_tile_never_takes_less_time(steps: list[tuple[float, float]], size: float) -> None:
    points, work, time = [], 0.0, 0.01
    for more, longer in steps:
        work, time = work + more, time + longer
        points.append((work, work / time))
    table = SpeedTable(points)
    took = size / table.at(size)
    assert size * 1.001 / table.at(size * 1.001) >= took * (1 - 1e-9)
    # Where more work takes no longer, a time that is rounded down is that of the least of it.
    assert table.size_in(took * (1 + 1e-12)) >= size * (1 - 1e-6)
    assert table.at(size) <= table.fastest * (1 + 1e-9)


def test_copies_and_what_other_processes_get_are_equal() -> None:
    for again in (pickle.loads(pickle.dumps(TABLE)), copy.deepcopy(TABLE), copy.copy(TABLE)):
        assert again == TABLE
        assert again.at(250) == TABLE.at(250)


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ([(1.0, 1.0)], "from 2 to 64 sizes, not 1; one speed for all sizes is a number"),
        ([(float(n), 1.0) for n in range(1, 66)], "not 65"),
        ([(0.0, 1.0), (1.0, 1.0)], "sizes > 0"),
        ([(math.nan, 1.0), (1.0, 1.0)], "sizes > 0"),
        ([(1.0, 0.0), (2.0, 1.0)], "must be > 0, not 0"),
        ([(1.0, 1.0), (1.0, 2.0)], "two speeds for size 1"),
        ([(100.0, 1.0), (200.0, 3.0)], "lets a tile of 200 flop take less time than one of 100: 66.6667 after 100"),
    ],
)
def test_what_cannot_be_is_refused(points: list[tuple[float, float]], problem: str) -> None:
    with pytest.raises(ClusterError, match=problem):
        SpeedTable(points)


def test_a_file_has_them_as_pairs_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[[processors]]\nname = "g"\nspeed = [["10 Mflop", "1 Tflop/s"], ["1 Gflop", "4 Tflop/s"]]\ncount = 2\nhost = "h"\n'
    )
    cluster = read_cluster(path)
    assert cluster.processors[1].speed == SpeedTable([(1e7, 1e12), (1e9, 4e12)])
    assert cluster.sized == ("g0", "g1")
    path.write_text(cluster_toml(cluster))
    assert read_cluster(path) == cluster
    assert parse_flop("2.5 Gflop") == 2.5e9


@pytest.mark.parametrize(
    ("speed", "problem"),
    [
        ("[[1, 1.0]]", r"processors\[0\].speed: must have from 2 to 64 sizes"),
        ("[1.0, 2.0]", "must be a list of .size, speed.* its item 0 is 1.0"),
        ('[["10 MB", 1.0], [2e9, 2.0]]', "item 0: .*not an amount of computing"),
        ("[[1, -1.0], [2, 1.0]]", "item 0: must be > 0, not -1"),
    ],
)
def test_a_file_with_faults_says_where(tmp_path: Path, speed: str, problem: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'[[processors]]\nname = "g"\nspeed = {speed}\n')
    with pytest.raises(ClusterError, match=problem):
        read_cluster(path)


def test_who_can_only_use_numbers_refuses_them_by_name() -> None:
    needs = "needs one speed for each processor, but those of gpu depend on the size of the tile"
    with pytest.raises(ClusterError, match=f"a lab.* {needs}"):
        plan_lab(GPU, cores=2)
    work = Workload.mlp(20, 8, 2, samples=64)
    layout = plan("even", cluster=GPU, workload=work).layout
    with pytest.raises(ClusterError, match=f"rule='settling'.* {needs}"):
        Controller(Retiler(every=20), cluster=GPU, workload=work, layout=layout)
    assert Cluster.from_speeds([1.0, 2.0]).plain_speeds("a lab") == (1.0, 2.0)
