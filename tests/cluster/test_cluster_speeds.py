"""Speeds of clusters, and the cores that a process may use."""

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor, SpeedTable, check_speeds, listed_speeds, parse_speeds
from tatami.cluster.cores import base_here, memory_here, quota_here
from tatami.errors import ClusterError


def test_speeds() -> None:
    assert parse_speeds("1,1.5, 2") == (1.0, 1.5, 2.0)
    assert parse_speeds("10 Gflop/s,2e9", expected=2) == (1e10, 2e9)


@given(st.lists(st.floats(1e-12, 1e24), min_size=1, max_size=8))
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
