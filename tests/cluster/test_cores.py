"""How many cores a process may keep busy, and what memory it may have, by the files of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tatami.cluster.cores import base_here, cores_here, memory_here, quota_here


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
    assert 0 < cores_here() <= len(os.sched_getaffinity(0))


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
