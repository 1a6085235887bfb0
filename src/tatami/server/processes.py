"""Operating-system processes, by machine and id."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
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
    """Of this process, which must be one of Ray's."""
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


def kill(pid: int) -> None:
    """End it, even where it is stopped and hears nothing else."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether it runs or is stopped; 0 is nobody."""
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended stays in the table until its parent has taken note.
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
