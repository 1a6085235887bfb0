"""Operating-system processes, by machine and id, and what ties those of Ray to Ray."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who a process is.

    Attributes:
        node: of Ray; several may be on one machine.
        machine: the same for processes that see each other's ids.
        model: signature of the model that it has built; "" of a server.
    """

    pid: int
    node: str
    machine: str
    model: str = ""


def identity(*, model: str = "") -> Identity:
    """The identity of this process, which must be one of Ray's."""
    import ray

    return Identity(pid=os.getpid(), node=ray.get_runtime_context().get_node_id(), machine=machine(), model=model)


@lru_cache(maxsize=1)
def machine() -> str:
    """Tells machines apart, and containers on one machine."""
    boot, space = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    return f"{os.uname().nodename}/{boot}/{space}"


def started_with(name: str, value: str) -> list[int]:
    """The processes of this user that had this variable in their environment when they were started."""
    return [pid for pid, found in values_at_start(name).items() if found == value]


def values_at_start(name: str) -> dict[int, str]:
    """By process of this user that runs: the value that this variable had when the process was started, where it had one."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or gone
            for variable in (process / "environ").read_bytes().split(b"\0"):
                if variable.startswith(f"{name}=".encode()):
                    found[int(process.name)] = os.fsdecode(variable.partition(b"=")[2])
    return {pid: value for pid, value in found.items() if is_running(pid)}


def sees_our_files(pid: int) -> bool:
    """Whether a path means the same to that process as to this one: they have the file systems in common."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    return False


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if _status(int(process.name))[1:2] == [str(pid)]]


def kill(pid: int) -> None:
    """End it, even where it is stopped and hears nothing else."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether it runs or is stopped; False for process 0."""
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    return _status(pid)[:1] not in ([], ["Z"])  # one that has ended stays in the table until its parent has taken note


def is_stopped(pid: int) -> bool:
    """Whether it was stopped by a signal, and waits to be continued."""
    return _status(pid)[:1] in (["T"], ["t"])


def _status(pid: int) -> list[str]:
    """State, parent and more, as the kernel lists them; [] where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class WatchedProcess:
    """A process of a run, as a Ray actor, which the run's process watches."""

    def watch(self, pause_s: float) -> None:
        """A sign of life after `pause_s`; runs in a thread of its own, and fails at once when the process ends."""
        time.sleep(pause_s)


@contextmanager
def tethered() -> Iterator[None]:
    """Around calls of Ray, and nothing of the user's: where they fail, as this node is dying, end the process.

    Ray ends it too, a moment later. Until then a call gives "connection reset by peer" and the like, which must not be
    told as an error of the user's code: that would stop the run, and a process that is gone does not.

    Raises:
        ObjectStoreFullError, OutOfDiskError: of Ray; these do not go away with the process.
    """
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError  # an optional package

    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError):
        raise
    except (RayError, OSError):
        os._exit(1)
