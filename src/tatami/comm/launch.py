"""Starting ranks: by this program where they are MPICH's and on this machine, and otherwise by the mpiexec of the MPI library.

Either way it is said plainly which rank ended the job, and how.
"""

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

from tatami.cluster.device_choice import DEVICE_VARIABLE
from tatami.comm.guard import LAST_WORDS, WATCHED
from tatami.comm.leftovers import without_leftovers
from tatami.comm.local import LocalJob
from tatami.comm.mpiexec import run_mpiexec, show
from tatami.comm.signals import stop_requests
from tatami.errors import InputError, MissingExtraError

_GUARD = Path(__file__).with_name("guard.py")
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
ON_LOOPBACK = {
    "UCX_NET_DEVICES": _LOOPBACK,
    "FI_TCP_IFACE": _LOOPBACK,
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "NCCL_SOCKET_IFNAME": _LOOPBACK,
}
"""For ranks of one machine, which would listen on its first network card: MPICH's two network modules, gloo and NCCL."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """An mpiexec; `family` is `mpich` (Hydra of MPICH and its kin), `openmpi`, or `other` (what takes Hydra's options)."""

    program: Path
    family: str


def run(command: Sequence[str], *, ranks: int, hosts: Sequence[str] | None = None) -> int:
    """Run `command` (a program and its arguments) on `ranks` ranks, and return the exit code of the job.

    When a rank fails, the others are stopped, and standard error says which one it was and how it ended. Ctrl-C, SIGTERM and
    SIGHUP end all ranks: they are asked to first, and have some seconds to save their work.

    Args:
        hosts: machines to start on, each `name` or `name:ranks`; None for this machine alone, over its loopback.

    Raises:
        InputError: fewer than 1 rank, no command, or invalid host names.
        MissingExtraError: no mpiexec is found.
        CommError: this machine does not let so many processes be started.
    """
    launcher = find_launcher()
    check_ranks(ranks, hosts=hosts)
    here = hosts is None and launcher.family == "mpich"
    words = rank_command(command, guarded=not here)
    environ = {"UCX_LOG_LEVEL": "error", **(ON_LOOPBACK if hosts is None else {}), **os.environ}
    with stop_requests() as stop, tempfile.TemporaryDirectory(prefix="tatami-run-") as folder, without_leftovers():
        environ[LAST_WORDS] = folder
        if here:
            environ[WATCHED] = "1"
            job = LocalJob(words, ranks=ranks, environ=environ, show=show, said=lambda pid: any(Path(folder).glob(f"*-{pid}")))
            code = job.run(stop)
        else:
            environ.pop(WATCHED, None)
            code = run_mpiexec(launch_command(launcher, words, ranks=ranks, hosts=hosts), environ=environ, stop=stop)
        _show_last_words(Path(folder))
        if stop.number is not None:
            code = 128 + stop.number
            print(f"tatami run: ended by {signal.Signals(stop.number).name}; all {ranks} ranks are stopped", file=sys.stderr)
        elif code != 0:
            print(f"tatami run: the job of {ranks} ranks ended with exit code {code}", file=sys.stderr, flush=True)
    return code


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
    families = {"openmpi": r"Open MPI|OpenRTE|PRRTE|prte", "mpich": r"HYDRA build details"}
    family = next((name for name, words in families.items() if re.search(words, version)), "other")
    return Launcher(program=Path(found), family=family)


def rank_command(words: Sequence[str], *, guarded: bool = True) -> list[str]:
    """What each rank runs: `script.py ...` and `-m module ...` through the runner, anything else as it is.

    Args:
        guarded: under a guard, for launchers that do not say which rank was the first to end.

    Raises:
        InputError: there is nothing to run, or the script is not there.
    """
    if not words:
        raise InputError("nothing to run: give a Python script and its arguments, as in `tatami run -n 4 script.py`")
    guard = [sys.executable, "-I", str(_GUARD)] if guarded else []
    if words[0] == "-m" or words[0].endswith(".py"):
        if words[0] != "-m" and not Path(words[0]).is_file():
            raise InputError(f"there is no script {words[0]!r} in {os.getcwd()}")
        return [*guard, sys.executable, "-m", "tatami.comm.runner", *words]
    if shutil.which(words[0]) is None:
        raise InputError(
            f"there is no program {words[0]!r}; give a script that ends in .py, `-m module`, or a program on the PATH"
        )
    return [*guard, *words]


def check_ranks(ranks: int, *, hosts: Sequence[str] | None) -> None:
    """Refuse what cannot be started.

    Raises:
        InputError: fewer than 1 rank, or invalid host names.
    """
    if ranks < 1:
        raise InputError(f"cannot start {ranks} ranks; give at least 1")
    if hosts is not None and (not hosts or not all(re.fullmatch(r"\w[\w.-]*(:[1-9]\d*)?", host) for host in hosts)):
        raise InputError(f"hosts {list(hosts)!r}: give names, each with its number of ranks if you like, as in node1:4,node2:4")


def launch_command(launcher: Launcher, command: Sequence[str], *, ranks: int, hosts: Sequence[str] | None) -> list[str]:
    """The whole command line, with the flags that this launcher needs.

    Raises:
        InputError: as `check_ranks`.
    """
    check_ranks(ranks, hosts=hosts)
    flags = ["-n", str(ranks)]
    if launcher.family == "openmpi":
        # Ranks choose their own number of threads (TATAMI_THREADS), so they must not be bound to one core each.
        flags += ["--oversubscribe", "--bind-to", "none"]
        flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # On one machine no rank needs TCP, for which each would listen on all interfaces.
        flags += ["--host", ",".join(hosts)] if hosts is not None else ["--mca", "btl", "^tcp"]
        flags += ["-x", DEVICE_VARIABLE] if DEVICE_VARIABLE in os.environ else []
    else:
        flags += ["-hosts", ",".join(hosts)] if hosts is not None else ["-launcher", "fork", "-iface", _LOOPBACK]
    return [str(launcher.program), *flags, *command]


def _show_last_words(directory: Path) -> None:
    """What the ranks that ended the job said of it, the first one first."""
    for path in sorted(directory.iterdir()):
        if path.suffix != ".part":
            sys.stderr.write(path.read_text(encoding="utf-8"))
    sys.stderr.flush()
