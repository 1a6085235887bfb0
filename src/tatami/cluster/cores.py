"""How many cores a process may keep busy, and the memory of its machine."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores_here() -> float:
    """Those that this process may run on; less where a control group gives it less time than that."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = quota_here()
    return cores if quota is None else min(cores, quota)


def memory_here() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def quota_here(*, groups: Path = _GROUPS, own: Path = _OWN) -> float | None:
    """The CPU time, in cores, that control groups of either version leave this process; None where nothing limits it.

    Args:
        groups: where control groups are files: the group at the top, which of a container is its own, and those below.
        own: names the groups of this process, one a line: "0::/a/b", or of the older version "4:cpu,cpuacct:/a/b".
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = PurePosixPath(path)
        top = groups / "cpu" if controllers else groups
        quotas += [_quota_of(top / each.relative_to("/")) for each in (group, *group.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


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
