"""How many cores a process may keep busy, and how much memory there is for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_here(*, groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Bytes of this machine, or those that control groups of either version leave this process, where they are less.

    Args:
        groups, own: as for `quota_here`.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for group in _groups_above("memory", groups, own) if (limit := _limit_of(group)) is not None]
    return min(machine_bytes, *limits) if limits else machine_bytes


def base_here() -> int:
    """Bytes of memory of its own that this process has now: of a rank that holds no network, Python, torch and MPI. 0 where the
    kernel does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def quota_here(*, groups: Path = _GROUPS, own: Path = _OWN) -> float | None:
    """The CPU time, in cores, that control groups of either version leave this process; None where nothing limits it.

    Args:
        groups: where control groups are files: the group at the top, which of a container is its own, and those below.
        own: names the groups of this process, one a line: "0::/a/b", or of the older version "4:cpu,cpuacct:/a/b".
    """
    quotas = (_quota_of(group) for group in _groups_above("cpu", groups, own))
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups_above(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's control groups that `controller` may have, and of all groups above them."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path)
        top = groups / controller if controllers else groups
        yield from (top / each.relative_to("/") for each in (group, *group.parents))


def _limit_of(group: Path) -> int | None:
    """Bytes of memory of a group; None where it has no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((group / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def _quota_of(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (group / name).read_text(encoding="ascii").strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        return int(quota) / int(period) if quota.isdecimal() else None
    except (OSError, ValueError):
        return None
