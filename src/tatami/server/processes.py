"""Operating-system processes of this machine, by their id."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


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
