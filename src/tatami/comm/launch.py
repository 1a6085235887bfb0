"""Starting ranks: MPICH's on this machine by this program, all others by the mpiexec of the MPI library.

Where ranks end before their time, MPICH leaves files in shared memory, which take memory from all others: they are removed.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tatami.cluster.device_choice import DEVICE_VARIABLE
from tatami.comm.forked import can_copy
from tatami.comm.job_token import TOKEN_VARIABLE, new_job_token
from tatami.comm.local import LOOK_S, LocalJob
from tatami.comm.session import WATCHED
from tatami.comm.signals import StopRequest, end_with_parent, stop_requests
from tatami.errors import InputError, MissingExtraError

_CHUNK_BYTES = 1 << 16
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


def run(command: Sequence[str], *, ranks: int, hosts: Sequence[str] | None = None, copies: bool = False) -> int:
    """Run `command` (a program and its arguments) on `ranks` ranks, and return the exit code of the job.

    When a rank fails, the others are stopped. On this machine, under MPICH, the last line on standard error says which rank it
    was and how it ended; mpiexec, called for other machines and other MPI libraries, says so in its own words. Ctrl-C, SIGTERM
    and SIGHUP end all ranks: they are asked to first, and have some seconds to save their work.

    Args:
        hosts: machines to start on, each `name` or `name:ranks`; None for this machine alone, over its loopback.
        copies: ranks that are Python programs may be copies of this process, with all that it has loaded, where it is on Linux
            and has no other threads: they start at once. For a process that does nothing else.

    Raises:
        InputError: fewer than 1 rank, no command, or invalid host names.
        MissingExtraError: no mpiexec is found.
        CommError: this machine does not let so many processes be started.
    """
    launcher = find_launcher()
    check_ranks(ranks, hosts=hosts)
    words = rank_command(command)
    environ = {"UCX_LOG_LEVEL": "error", **(ON_LOOPBACK if hosts is None else {}), **os.environ}
    environ.setdefault(TOKEN_VARIABLE, new_job_token())
    with stop_requests() as stop, without_leftovers():
        if hosts is None and launcher.family == "mpich":
            program = command if copies and words != [*command] and can_copy() else None
            code = LocalJob(words, ranks=ranks, environ=environ, show=_show, program=program).run(stop)
        else:
            environ.pop(WATCHED, None)
            code = _run_mpiexec(launch_command(launcher, words, ranks=ranks, hosts=hosts), environ=environ, stop=stop)
            if code != 0 and stop.number is None:
                print(
                    f"tatami run: the job of {ranks} ranks ended with exit code {code}{_advice(hosts)}",
                    file=sys.stderr,
                    flush=True,
                )
        if stop.number is not None:
            code = 128 + stop.number
            print(f"tatami run: ended by {signal.Signals(stop.number).name}; all {ranks} ranks are stopped", file=sys.stderr)
    return code


def _advice(hosts: Sequence[str] | None) -> str:
    if not hosts:
        return ""
    names = ",".join(host.split(":")[0] for host in hosts)
    return f". If ranks did not start: `tatami doctor --hosts {names}` checks these machines"


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


def rank_command(words: Sequence[str]) -> list[str]:
    """What each rank runs: `script.py ...` and `-m module ...` through the runner, anything else as it is.

    Raises:
        InputError: there is nothing to run, or the script is not there.
    """
    if not words:
        raise InputError("nothing to run: give a Python script and its arguments, as in `tatami run -n 4 script.py`")
    if words[0].startswith("-") and words[0] != "-m":
        raise InputError(f"there is no option {words[0]!r} (see --help); the script or program comes after the options")
    if words[0] == "-m" or words[0].endswith(".py"):
        if words[0] != "-m" and not Path(words[0]).is_file():
            raise InputError(f"there is no script {words[0]!r} in {os.getcwd()}")
        return [sys.executable, "-m", "tatami.comm.runner", *words]
    if shutil.which(words[0]) is None:
        raise InputError(
            f"there is no program {words[0]!r}; give a script that ends in .py, `-m module`, or a program on the PATH"
        )
    return [*words]


def check_ranks(ranks: int, *, hosts: Sequence[str] | None) -> None:
    """Refuse what cannot be started.

    Raises:
        InputError: fewer than 1 rank, invalid host names, or more ranks than these hosts have places.
    """
    if ranks < 1:
        raise InputError(f"cannot start {ranks} ranks; give at least 1")
    if hosts is not None and (not hosts or not all(re.fullmatch(r"\w[\w.-]*(:[1-9]\d*)?", host) for host in hosts)):
        raise InputError(f"hosts {list(hosts)!r}: give names, each with its number of ranks if you like, as in node1:4,node2:4")
    places = [host.partition(":")[2] for host in hosts or ()]
    if hosts is not None and all(places) and sum(map(int, places)) < ranks:
        raise InputError(
            f"{ranks} ranks do not fit on {','.join(hosts)}, with places for {sum(map(int, places))}: give fewer ranks (-n), "
            "or more of them to a host"
        )


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
        flags += ["-x", TOKEN_VARIABLE] if hosts is not None else []
    else:
        flags += ["-hosts", ",".join(hosts)] if hosts is not None else ["-launcher", "fork", "-iface", _LOOPBACK]
    return [str(launcher.program), *flags, *command]


def _run_mpiexec(arguments: Sequence[str], *, environ: Mapping[str, str], stop: StopRequest) -> int:
    """Run it to its end, or until `stop` ends it; returns its exit code, of a signal as a shell has it."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environ, preexec_fn=end_with_parent)
    assert process.stdout is not None
    with process.stdout, selectors.DefaultSelector() as selector:
        selector.register(stop, selectors.EVENT_READ)
        selector.register(process.stdout, selectors.EVENT_READ)
        while process.stdout in selector.get_map() and (stop.number is None or process.poll() is None):
            stop.pursue(ask=process.terminate, end=process.kill)
            for key, _ in selector.select(None if stop.number is None else LOOK_S):
                if key.fileobj is process.stdout:
                    data = os.read(key.fd, _CHUNK_BYTES)
                    if not data:
                        selector.unregister(process.stdout)
                    _show(data)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _show(data: bytes) -> None:
    """Onto standard output, which may be a file, a terminal, or a test's stand-in without bytes."""
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    else:
        sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()


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
