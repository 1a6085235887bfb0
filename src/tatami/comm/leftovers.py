"""What MPICH leaves behind where ranks end before their time: files in shared memory, which take memory from all others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PROCESSES = Path("/proc")
_NAMES = "mpich_shm_*"
_CLOCK_S = 1.0
"""File times are taken from a coarser clock than ours."""


@contextmanager
def without_leftovers() -> Iterator[None]:
    """Around a job of ranks on this machine: removes what it leaves in shared memory, however it ends."""
    began_s = time.time()
    try:
        yield
    finally:
        remove_leftovers(since_s=began_s)


def remove_leftovers(*, since_s: float) -> None:
    """Remove this user's files of MPICH that are younger than `since_s` (seconds since the epoch) and mapped by no process.

    A job's ranks have each of its files mapped from its beginning to their end, so other jobs of this user lose nothing.
    """
    found = [path for path in SHARED_MEMORY.glob(_NAMES) if _is_ours(path, since_s=since_s - _CLOCK_S)]
    if found:
        in_use = mapped()
        for path in found:
            if str(path) not in in_use:
                path.unlink(missing_ok=True)


def _is_ours(path: Path, *, since_s: float) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:  # its job has just ended well
        return False
    return status.st_uid == os.geteuid() and status.st_mtime >= since_s


def mapped() -> set[str]:
    """The files of MPICH that processes of this user have mapped."""
    found = set()
    for maps in _PROCESSES.glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            found |= {
                line.split(maxsplit=5)[5] for line in maps.read_text(errors="replace").splitlines() if "mpich_shm_" in line
            }
    return found
