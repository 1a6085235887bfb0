"""`python tests/logged.py LOG COMMAND...`: runs a command; what it prints is shown, and added to a file.

It ends with the command, also where a process that the command left over holds its output: that one is named, and ended.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import BinaryIO

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): a process that loses its parent becomes a child of this one."""
LEFT_S = float(os.environ.get("TATAMI_LEFT_OVER_S", "20"))
"""How long what is left over may take to end by itself."""


def main(log: Path, command: list[str]) -> int:
    """Run the command; its exit code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    copying = Thread(target=copy, args=(process.stdout, log), daemon=True)
    copying.start()
    ended = status = 0
    while ended != process.pid:  # others are orphans that ended, and nobody else waits for them
        ended, status = os.waitpid(-1, 0)
    end_left_over()
    copying.join(LEFT_S)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def copy(source: BinaryIO, log: Path) -> None:
    with log.open("ab", buffering=0) as kept:
        while chunk := os.read(source.fileno(), 1 << 16):
            kept.write(chunk)
            with suppress(OSError):
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()


def end_left_over() -> None:
    """Wait for the children of this process. Those that stay are named, and end by an abort, which Python may explain."""
    until = monotonic() + LEFT_S
    with suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0 and monotonic() < until:
                sleep(0.05)
            elif pid == 0:
                for each in Path("/proc").glob("[0-9]*/stat"):
                    end_if_child(each)
                until = monotonic() + 1.0


def end_if_child(stat: Path) -> None:
    with suppress(OSError):
        if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
            words = (stat.parent / "cmdline").read_text().replace("\0", " ")
            print(f"== left over, and ended: {words}", flush=True)
            os.kill(int(stat.parent.name), signal.SIGABRT)
            sleep(1.0)
            os.kill(int(stat.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
