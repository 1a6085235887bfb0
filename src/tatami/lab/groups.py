"""CPU quotas, limits of memory and sudden death by control groups, of version 1 and 2.

A lab has one group, a host has one in it, and in that are the groups that hold processes: one for every processor, by the
number of its rank, with a quota; and `free`, without one, for what a real cluster's ranks do not wait for: mpiexec's proxy.
Memory is limited for a host as a whole: what a rank takes before it joins its own group is its host's as well.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import final

from tatami.errors import LabError
from tatami.lab.network import INSTEAD

FREE = "free"
PERIOD_S = 10e-3
"""Ten times shorter than the kernel's own: no pause is longer than 10 ms. Still shorter ones are not kept, for the kernel looks
only at its ticks, every 4 ms at 250 Hz: with a period of 2 ms a rank got 20 % less than it was to have."""
SMALLEST_QUOTA_S = 1e-3
"""The kernel refuses less; a processor so slow gets a longer period."""
LAB_WEIGHT = 64
"""CPU weight of a lab against the rest of the machine, whose weight is 1: other programs must not slow its hosts."""

_NO_MEMORY = (
    "this lab is to limit the memory of its hosts, and the hierarchy of control groups that it uses here has no memory "
    "controller. Mount it (in a container: --privileged --cgroupns=host), or leave base_memory out: hosts have no limit then"
)
_END_PATIENCE_S = 60.0
_POLL_S = 5e-3


def quota_and_period_us(cores: float) -> tuple[int, int]:
    """Microseconds of CPU time, and of the period for which they are, for this many cores."""
    period_s = max(PERIOD_S, SMALLEST_QUOTA_S / cores)
    return round(cores * period_s * 1e6), round(period_s * 1e6)


class AbstractGroups(ABC):
    """The control groups of one lab, called `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cores: dict[str, dict[str, float]] = {}

    @property
    @abstractmethod
    def roots(self) -> tuple[Path, ...]:
        """The lab's group, in every hierarchy that it uses; the first is the one that lists processes."""

    @abstractmethod
    def build_lab(self) -> None:
        """Make the lab's group.

        Raises:
            LabError: the machine does not let us.
        """

    @abstractmethod
    def build_host(self, host: str, *, leaves: Sequence[str]) -> None:
        """Make a host's groups."""

    def set_quota(self, host: str, leaf: str, *, cores: float) -> None:
        """How many cores, or what part of one, the processes of a leaf may use.

        Where two processors meet on a core, each gets it in proportion to its quota: with equal weights the larger one would
        fall behind, by 10 % with quotas of 0.9, 0.45 and 0.45 on 2 cores.
        """
        self._write_quota(host, leaf, cores=cores)
        leaves = self._cores.setdefault(host, {})
        leaves[leaf] = cores
        self._write_weight(self.roots[0] / host / leaf, cores=cores)
        self._write_weight(self.roots[0] / host, cores=sum(leaves.values()))

    @abstractmethod
    def _write_quota(self, host: str, leaf: str, *, cores: float) -> None: ...

    @abstractmethod
    def _write_weight(self, group: Path, *, cores: float) -> None: ...

    @abstractmethod
    def kill(self, host: str) -> None:
        """End all processes of a host at once: none of them sees another one die. Returns when they are gone."""

    @abstractmethod
    def limit_memory(self, host: str, *, limit_bytes: int) -> None:
        """Let all processes of a host together have so much memory, and no swap; the kernel ends one that wants more.

        Raises:
            LabError: no control group here limits memory.
        """

    @abstractmethod
    def num_starved(self, host: str) -> int:
        """How many processes of a host the kernel has ended because they wanted more memory than there was."""

    def files(self, host: str, leaf: str) -> list[str]:
        """The files into which a process writes its number to become one of the host's."""
        return [str(root / host / leaf / "cgroup.procs") for root in self.roots]

    def processes(self, host: str) -> list[int]:
        """The numbers of a host's processes."""
        return _processes(self.roots[0] / host)

    def remove(self) -> None:
        """Kill every process in the lab's groups and take them away; they may be gone already.

        Raises:
            LabError: a process did not die.
        """
        for host in sorted({path.name for root in self.roots if root.is_dir() for path in root.iterdir() if path.is_dir()}):
            self.kill(host)
        for root in (*self.roots, *self._beside):
            for folder, _, _ in os.walk(root, topdown=False):
                _remove_group(Path(folder))

    @property
    def _beside(self) -> tuple[Path, ...]:
        """The lab's group in hierarchies that it may use, or not."""
        return ()

    def _wait_until_gone(self, host: str) -> None:
        deadline_s = time.monotonic() + _END_PATIENCE_S
        while left := self.processes(host):
            if time.monotonic() > deadline_s:
                raise LabError(f"processes of host {host} do not die: {left}; end them, then run `tatami lab clean`")
            time.sleep(_POLL_S)


@final
class GroupsV1(AbstractGroups):
    """Version 1: `cpu` for the quotas, and `freezer` where it is mounted, so that all stop before the first one dies; `memory`
    of hosts whose memory is limited."""

    def __init__(self, name: str, *, cpu: Path, freezer: Path | None, memory: Path | None = None) -> None:
        super().__init__(name)
        self._cpu = cpu
        self._freezer = freezer
        self._memory = memory

    @property
    def roots(self) -> tuple[Path, ...]:
        return tuple(mount / self._name for mount in (self._cpu, self._freezer) if mount is not None)

    def build_lab(self) -> None:
        for root in self.roots:
            _make_group(root)
        _write(self.roots[0] / "cpu.shares", 1024 * LAB_WEIGHT)

    def build_host(self, host: str, *, leaves: Sequence[str]) -> None:
        for root in self.roots:
            for leaf in leaves:
                _make_group(root / host / leaf)

    def _write_quota(self, host: str, leaf: str, *, cores: float) -> None:
        group = self.roots[0] / host / leaf
        quota_us, period_us = quota_and_period_us(cores)
        # The kernel checks each of the two against the other as it was: without a quota any period is allowed.
        _write(group / "cpu.cfs_quota_us", -1)
        _write(group / "cpu.cfs_period_us", period_us)
        _write(group / "cpu.cfs_quota_us", quota_us)

    def _write_weight(self, group: Path, *, cores: float) -> None:
        _write(group / "cpu.shares", max(2, round(10240 * cores)))

    @property
    def _beside(self) -> tuple[Path, ...]:
        return () if self._memory is None else (self._memory / self._name,)

    def limit_memory(self, host: str, *, limit_bytes: int) -> None:
        if self._memory is None:
            raise LabError(_NO_MEMORY)
        group = self._memory / self._name / host
        _make_group(group)
        _write(group / "memory.limit_in_bytes", limit_bytes)
        if (group / "memory.memsw.limit_in_bytes").exists():  # memory and swap together; not below the former
            _write(group / "memory.memsw.limit_in_bytes", limit_bytes)
        else:
            _write(group / "memory.swappiness", 0)

    def num_starved(self, host: str) -> int:
        return 0 if self._memory is None else _oom_kills(self._memory / self._name / host / "memory.oom_control")

    def files(self, host: str, leaf: str) -> list[str]:
        limited = [each / host for each in self._beside if (each / host).is_dir()]
        return super().files(host, leaf) + [str(group / "cgroup.procs") for group in limited]

    def kill(self, host: str) -> None:
        frozen = [root / host / "freezer.state" for root in self.roots[1:] if (root / host).is_dir()]
        for state in frozen:
            _write(state, "FROZEN")
        for pid in self.processes(host):
            _end(pid)
        for state in frozen:
            _write(state, "THAWED")
        self._kill_newborn(host)
        self._wait_until_gone(host)

    def _kill_newborn(self, host: str) -> None:
        """Without a freezer a process may have been started while its parent was being killed."""
        for _ in range(100):
            if not (left := self.processes(host)):
                return
            for pid in left:
                _end(pid)
            time.sleep(_POLL_S)


@final
class GroupsV2(AbstractGroups):
    """Version 2: one hierarchy; the kernel kills a whole group by itself, since 5.14."""

    def __init__(self, name: str, *, mount: Path) -> None:
        super().__init__(name)
        self._mount = mount

    @property
    def roots(self) -> tuple[Path, ...]:
        return (self._mount / self._name,)

    def build_lab(self) -> None:
        if "cpu" not in (self._mount / "cgroup.subtree_control").read_text(encoding="ascii").split():
            _write(self._mount / "cgroup.subtree_control", "+cpu")
        _make_group(self.roots[0])
        _write(self.roots[0] / "cgroup.subtree_control", "+cpu")
        _write(self.roots[0] / "cpu.weight", min(10000, 100 * LAB_WEIGHT))

    def build_host(self, host: str, *, leaves: Sequence[str]) -> None:
        _make_group(self.roots[0] / host)
        _write(self.roots[0] / host / "cgroup.subtree_control", "+cpu")
        for leaf in leaves:
            _make_group(self.roots[0] / host / leaf)

    def _write_quota(self, host: str, leaf: str, *, cores: float) -> None:
        quota_us, period_us = quota_and_period_us(cores)
        _write(self.roots[0] / host / leaf / "cpu.max", f"{quota_us} {period_us}")

    def _write_weight(self, group: Path, *, cores: float) -> None:
        _write(group / "cpu.weight", min(10000, max(1, round(1000 * cores))))

    def limit_memory(self, host: str, *, limit_bytes: int) -> None:
        if "memory" not in _controllers(self._mount):
            raise LabError(_NO_MEMORY)
        for group in (self._mount, self.roots[0]):
            if "memory" not in (group / "cgroup.subtree_control").read_text(encoding="ascii").split():
                _write(group / "cgroup.subtree_control", "+memory")
        _write(self.roots[0] / host / "memory.max", limit_bytes)
        if (self.roots[0] / host / "memory.swap.max").exists():  # where there is swap
            _write(self.roots[0] / host / "memory.swap.max", 0)

    def num_starved(self, host: str) -> int:
        return _oom_kills(self.roots[0] / host / "memory.events")

    def kill(self, host: str) -> None:
        group = self.roots[0] / host
        if (group / "cgroup.kill").exists():
            _write(group / "cgroup.kill", 1)
        elif group.is_dir():
            _write(group / "cgroup.freeze", 1)
            for pid in self.processes(host):
                _end(pid)
            _write(group / "cgroup.freeze", 0)
        self._wait_until_gone(host)


def find_groups(name: str, *, mounts: str) -> AbstractGroups:
    """The control groups of a lab called `name`, of the version that this machine uses for the CPU.

    Args:
        mounts: what /proc/mounts says.

    Raises:
        LabError: no hierarchy has the CPU controller.
    """
    version_1: dict[str, Path] = {}
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        path = Path(place.encode().decode("unicode_escape"))
        if kind == "cgroup":
            for controller in options.split(","):
                version_1.setdefault(controller, path)
        elif kind == "cgroup2" and "cpu" in _controllers(path):
            return GroupsV2(name, mount=path)
    if "cpu" not in version_1:
        raise LabError(
            "a lab needs CPU quotas, and no control group hierarchy with the cpu controller is mounted here (in a container: "
            f"start it with --privileged --cgroupns=host). {INSTEAD}"
        )
    return GroupsV1(name, cpu=version_1["cpu"], freezer=version_1.get("freezer"), memory=version_1.get("memory"))


def _oom_kills(file: Path) -> int:
    """What the line `oom_kill` says, in files of either version."""
    try:
        words = file.read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _controllers(mount: Path) -> list[str]:
    file = mount / "cgroup.controllers"
    return file.read_text(encoding="ascii").split() if file.exists() else []


def _processes(group: Path) -> list[int]:
    found = []
    for folder, _, files in os.walk(group):
        if "cgroup.procs" in files:
            try:
                found += [int(line) for line in Path(folder, "cgroup.procs").read_text(encoding="ascii").split()]
            except OSError as error:
                # EOPNOTSUPP: a group of threads, which lists them elsewhere; ENODEV: it has just been removed.
                if error.errno not in (errno.EOPNOTSUPP, errno.ENODEV, errno.ENOENT):
                    raise
    return found


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _make_group(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"cannot make the control group {path}: {error.strerror}. {INSTEAD}") from None


def _remove_group(path: Path) -> None:
    """Remove a group. A process that has just died may hold it for some milliseconds; one that has just come is ended."""
    deadline_s = time.monotonic() + _END_PATIENCE_S
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                raise LabError(f"cannot remove the control group {path}: {error.strerror}") from None
        for pid in _processes(path):
            _end(pid)
        time.sleep(_POLL_S)


def _write(path: Path, value: int | str) -> None:
    try:
        path.write_text(str(value), encoding="ascii")
    except OSError as error:
        raise LabError(f"cannot write {value} into {path}: {error.strerror}. {INSTEAD}") from None
