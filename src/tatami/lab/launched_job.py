"""Ranks of a real MPI job over the hosts of a lab."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from tatami.comm.launch import find_launcher, rank_command
from tatami.errors import InputError, LabError

ENTER = Path(__file__).with_name("enter.py")
LAUNCH_SCRIPT = "launch"
JOB_VARIABLE = "TATAMI_LAB_JOB"
"""In the environment of a job's processes: which job of the lab it is."""
LOST = 137
"""The exit code of a job whose hosts were lost and whose other ranks have ended: mpiexec knows no better one."""
DESERTED_PATIENCE_S = 3.0
"""For ranks that are only about to start, and for mpiexec to end by itself."""
_POLL_S = 0.2
FIRST = "first"
"""The control group of a host's first processor, for a process that does not care."""
_STOP_PATIENCE_S = 5.0
_RUNNER = "tatami.comm.runner"
RANK_MODULE = "tatami.lab.rank"
"""Starts a Python script as a rank."""

REAL_NETWORK = {
    # UCX would find the shared memory that all hosts of a lab have in common: 2 us instead of 20, and no rate.
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "eth0",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
    "UCX_LOG_LEVEL": "error",
}
"""For MPICH, on either of its network modules: between hosts TCP over their interface; inside a host its own shared memory."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TATAMI_THREADS": "1", "TATAMI_WAIT": "sleep"}
"""A quota is for one thread, and a rank that polls while it waits would use it up. A user's own values win."""


class LabJob:
    """A command that runs on every processor of a lab.

    Args:
        process: mpiexec.
        is_deserted: whether hosts are lost, and on no other one is a process of this job left: mpiexec would wait forever.
    """

    def __init__(self, process: subprocess.Popen[bytes], *, is_deserted: Callable[[], bool]) -> None:
        self._process = process
        self._is_deserted = is_deserted
        self._deserted_s: float | None = None

    def poll(self) -> int | None:
        """The exit code, `LOST` where hosts were lost and all ranks elsewhere have ended; None while it runs."""
        code = self._process.poll()
        if code is not None:
            return LOST if self._deserted_s is not None else code if code >= 0 else 128 - code
        if not self._is_deserted():
            self._deserted_s = None
        elif self._deserted_s is None:
            self._deserted_s = time.monotonic()
        elif time.monotonic() > self._deserted_s + DESERTED_PATIENCE_S:
            self.stop()
            return LOST
        return None

    def wait(self, *, timeout_s: float | None = None) -> int:
        """The exit code, as of `poll`, once it has ended.

        Raises:
            LabError: it did not end within `timeout_s`.
        """
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise LabError(f"the command did not end within {timeout_s:g} s; it still runs in the lab")
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(min(left_s, _POLL_S))
        return code

    def stop(self) -> None:
        """End all its ranks on hosts that can be reached; what is left ends with the lab."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_STOP_PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def spawn_on(
    host_file: str,
    group: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdout: IO[bytes] | int | None = None,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process of a host.

    Args:
        host_file: what `enter.py` reads about the host.
        group: which of the host's control groups.
        command: a program and its arguments.
        environment: added to this process's own.
        stdout: as for `subprocess.Popen`.
        own_session: without the terminal, so that Ctrl-C there does not come to it.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(ENTER), host_file, group, *command],
        env={**ONE_THREAD, **os.environ, **REAL_NETWORK, **(environment or {})},
        stdin=subprocess.DEVNULL if own_session else None,
        stdout=stdout,
        start_new_session=own_session,
    )


def write_launch_script(folder: Path) -> None:
    """What mpiexec calls in place of ssh. A script, for it takes the name of one program without arguments."""
    script = folder / LAUNCH_SCRIPT
    words = [sys.executable, "-I", "-S", str(ENTER), "--launch", str(folder)]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    script.chmod(0o700)


def mpi_command(command: Sequence[str], *, hosts: Sequence[str], folder: Path) -> list[str]:
    """The command line of mpiexec: rank r of `command` on `hosts[r]`.

    Raises:
        InputError: there is nothing to run.
        LabError: this mpiexec is not MPICH's.
        MissingExtraError: there is no mpiexec.
    """
    if not command:
        raise InputError("nothing to run: give a command, as in `tatami lab run cluster.toml -- python train.py`")
    launcher = find_launcher()
    if launcher.family != "mpich":
        raise LabError(
            f"a lab starts its ranks by MPICH's mpiexec, and {launcher.program} is not it. Install it beside this Python:  "
            "pip install mpich mpi4py"
        )
    flags = ["-launcher", "ssh", "-launcher-exec", str(folder / LAUNCH_SCRIPT), "-iface", "eth0"]
    flags += ["-hosts", ",".join(hosts), "-n", str(len(hosts))]
    words = rank_command(_without_python(command))
    if _RUNNER in words:  # a Python script: it loads torch first, and then joins its processor's groups by itself
        place = words.index(_RUNNER)
        return [str(launcher.program), *flags, *words[:place], RANK_MODULE, str(folder), *words[place + 1 :]]
    return [str(launcher.program), *flags, sys.executable, "-I", "-S", str(ENTER), "--rank", str(folder), *words]


def environment_of(pid: int) -> bytes:
    """The variables with which a process was started, zeros between them; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _without_python(command: Sequence[str]) -> list[str]:
    """`python train.py` is `train.py`: it runs under the runner, with which one rank's failure ends all."""
    first, *rest = command
    is_python = first in ("python", "python3", sys.executable)
    return rest if is_python and rest and (rest[0] == "-m" or rest[0].endswith(".py")) else list(command)
