"""`python tests/busy.py [--loops 20] COMMAND...`: runs a command beside busy loops, and ends them whatever happens.

No test may depend on how busy the machine is: `make test-busy` runs all of them like this.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def loop(parent: int) -> None:
    """Keep a core busy until the process that started this one has ended, by whatever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        sum(range(100_000))


def main() -> int:
    """Run the command beside the loops; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=20, help="how many")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.command:
        parser.error("give a command to run, as in: python tests/busy.py make test")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    words = [sys.executable, "-I", "-S", __file__, "--loop", str(os.getpid())]
    loops: list[subprocess.Popen[bytes]] = []
    try:
        loops.extend(subprocess.Popen(words) for _ in range(given.loops))
        command = subprocess.Popen(given.command)
        try:
            return command.wait()
        finally:
            command.terminate()  # where this process is ended before it
    finally:
        for each in loops:
            each.kill()
        for each in loops:
            each.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--loop"]:
        loop(int(sys.argv[2]))
    else:
        sys.exit(main())
