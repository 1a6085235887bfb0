"""Starting ranks: finds the mpiexec that came with the MPI library, calls it, and says plainly which rank ended it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tatami.comm.guard import LAST_WORDS
from tatami.comm.leftovers import without_leftovers
from tatami.errors import InputError, MissingExtraError

_RULE = re.compile(rb"^(?:={83}\n|={1,83}\Z)", re.MULTILINE)
"""The line above the banner, or the beginning of one that has not come whole."""
_BANNER = b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
_GUARD = Path(__file__).with_name("guard.py")
_STOP_PATIENCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """An mpiexec; `family` is `mpich` (and what else uses Hydra) or `openmpi`."""

    program: Path
    family: str


def run(command: Sequence[str], *, ranks: int, hosts: Sequence[str] | None = None) -> int:
    """Run `command` (a program and its arguments) on `ranks` ranks, and return the exit code of the job.

    When a rank fails, the others are stopped, and standard error says which one it was and how it ended.

    Args:
        hosts: machines to start on, each `name` or `name:ranks`; None for this machine alone, over its loopback.

    Raises:
        InputError: fewer than 1 rank, no command, or hosts that are no names.
        MissingExtraError: no mpiexec is found.
    """
    arguments = launch_command(find_launcher(), rank_command(command), ranks=ranks, hosts=hosts)
    with tempfile.TemporaryDirectory(prefix="tatami-run-") as last_words, without_leftovers():
        environ = {"UCX_LOG_LEVEL": "error", **os.environ, LAST_WORDS: last_words}
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environ)
        try:
            _relay(process)
            code = process.wait()
        except KeyboardInterrupt:
            _stop(process)
            return 128 + signal.SIGINT
        finally:
            _show_last_words(Path(last_words))
    if code != 0:
        print(f"tatami run: the job of {ranks} ranks ended with exit code {code}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def find_launcher() -> Launcher:
    """The mpiexec beside this Python, where the MPI wheels put theirs, or else the one on the PATH.

    Raises:
        MissingExtraError: there is none.
    """
    beside = [Path(sys.executable).parent, Path(sys.prefix) / "bin"]
    found = shutil.which("mpiexec", path=os.pathsep.join(map(str, beside))) or shutil.which("mpiexec")
    if found is None:
        raise MissingExtraError("a launcher of MPI ranks (mpiexec)", extra="mpi")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return Launcher(program=Path(found), family="openmpi" if re.search(r"Open MPI|OpenRTE|PRRTE|prte", version) else "mpich")


def rank_command(words: Sequence[str]) -> list[str]:
    """What each rank runs, under its guard: `script.py ...` and `-m module ...` through the runner, anything else as it is.

    Raises:
        InputError: there is nothing to run, or the script is not there.
    """
    if not words:
        raise InputError("nothing to run: give a Python script and its arguments, as in `tatami run -n 4 script.py`")
    guard = [sys.executable, "-I", str(_GUARD)]
    if words[0] == "-m" or words[0].endswith(".py"):
        if words[0] != "-m" and not Path(words[0]).is_file():
            raise InputError(f"there is no script {words[0]!r} in {os.getcwd()}")
        return [*guard, sys.executable, "-m", "tatami.comm.runner", *words]
    if shutil.which(words[0]) is None:
        raise InputError(
            f"there is no program {words[0]!r}; give a script that ends in .py, `-m module`, or a program on the PATH"
        )
    return [*guard, *words]


def launch_command(launcher: Launcher, command: Sequence[str], *, ranks: int, hosts: Sequence[str] | None) -> list[str]:
    """The whole command line, with the flags that this launcher needs.

    Raises:
        InputError: fewer than 1 rank, or hosts that are no names.
    """
    if ranks < 1:
        raise InputError(f"cannot start {ranks} ranks; give at least 1")
    if hosts is not None and (not hosts or not all(re.fullmatch(r"\w[\w.-]*(:[1-9]\d*)?", host) for host in hosts)):
        raise InputError(f"hosts {list(hosts)!r}: give names, each with its number of ranks if you like, as in node1:4,node2:4")
    flags = ["-n", str(ranks)]
    if launcher.family == "openmpi":
        # Ranks choose their own number of threads (TATAMI_THREADS), so they must not be bound to one core each.
        flags += ["--oversubscribe", "--bind-to", "none"]
        flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        flags += ["--host", ",".join(hosts)] if hosts is not None else []
    else:
        flags += ["-hosts", ",".join(hosts)] if hosts is not None else ["-launcher", "fork", "-iface", "lo"]
    return [str(launcher.program), *flags, *command]


class _BannerFilter:
    """Passes on what ranks print, and keeps the banner that Hydra puts under it when a rank dies."""

    def __init__(self) -> None:
        self._held = b""
        self.banner = b""

    def feed(self, data: bytes) -> bytes:
        """What of the output so far can be shown."""
        self._held += data
        if self.banner:
            self.banner += self.rest()
            return b""
        for rule in _RULE.finditer(self._held):
            after = self._held[rule.end() :]
            if _BANNER.startswith(after[: len(_BANNER)]):
                shown, self._held = self._held[: rule.start()], self._held[rule.start() :]
                if after.startswith(_BANNER):
                    self.banner = self.rest()
                return shown
        return self.rest()

    def rest(self) -> bytes:
        """What is still held back."""
        shown, self._held = self._held, b""
        return shown


def _relay(process: subprocess.Popen[bytes]) -> None:
    """Show the output of the ranks as it comes, without the launcher's own banner."""
    assert process.stdout is not None
    banner_filter = _BannerFilter()
    sys.stdout.flush()
    while data := os.read(process.stdout.fileno(), 1 << 16):
        _show(banner_filter.feed(data))
    _show(banner_filter.rest())


def _show(data: bytes) -> None:
    """Onto standard output, which may be a file, a terminal, or a test's stand-in without bytes."""
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(data)
    else:
        sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()


def _show_last_words(directory: Path) -> None:
    """What the ranks that ended the job said of it, the first one first."""
    for path in sorted(directory.iterdir()):
        if path.suffix != ".part":
            sys.stderr.write(path.read_text(encoding="utf-8"))
    sys.stderr.flush()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The launcher has got the interrupt from the terminal too: give it time to stop its ranks, then make it."""
    try:
        process.wait(timeout=_STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
