"""How many cores a process may keep busy, by the files of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tatami.cluster.cores import cores_here, quota_here


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
