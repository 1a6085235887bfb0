"""Ranks as copies of the launcher, which has torch and this package loaded already: they start at once, and share its memory.

A new Python would load both again, which takes seconds of a core for each rank.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import final

import torch

from tatami.comm.program import run_program
from tatami.comm.signals import ENDING, end_with_parent

_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files that drivers of GPUs make: NVIDIA's, that of Windows below Linux, and AMD's."""


def _threads() -> frozenset[str]:
    """The threads of this process; none where the system does not say so, as only Linux does."""
    try:
        return frozenset(os.listdir("/proc/self/task"))
    except OSError:
        return frozenset()


_harmless = set(_threads())
"""Threads that numpy's BLAS has started while it was loaded, and that torch starts when it is given a number of threads:
both see to them where a process is copied."""


def can_copy() -> bool:
    """Whether a copy of this process is as good as a new one: it has no threads, and no connection to MPI or to a GPU.

    A copy has the one thread that made it. Where torch has computed on several, OpenMP would wait in it for the others.
    On a host with GPUs no copy is made: to ask torch whether there are any, as several of its modules do while they are loaded,
    connects a process to them, and no copy of it could compute there.
    """
    threads = _threads()
    return (
        bool(threads)
        and threads <= _harmless
        and threading.active_count() == 1
        and "mpi4py.MPI" not in sys.modules
        and not any(map(os.path.exists, _GPUS))
    )


@contextmanager
def copyable() -> Iterator[None]:
    """Inside of this torch computes on one thread, so that this process can be copied afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        threads = _threads()
        torch.set_num_threads(before)
        _harmless.update(_threads() - threads)


@final
class Copy:
    """A process made by `start_copy`, as `subprocess.Popen` shows one that it made.

    Attributes:
        returncode: how it ended, or the negative number of the signal; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Look whether it has ended; returns `returncode`."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # this process ignores SIGCHLD, and the system keeps no exit codes
                pid, status = self.pid, 0
            if pid != 0:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start_copy(words: Sequence[str], *, environ: Mapping[str, str], stdin: int, stdout: int, pass_fds: Collection[int]) -> Copy:
    """Start a copy of this process that runs a Python program, and ends with it.

    Args:
        words: `script.py ...` or `-m module ...`.
        pass_fds: open files that it has too, under the same numbers.

    Raises:
        OSError: the system lets no more processes be started.
    """
    _flush()
    gc.freeze()  # collections of garbage in the copy would otherwise write to all of the memory that it shares
    parent = os.getpid()
    # The handlers of this process would take signals of the copy for its own, until the copy has forgotten them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DeprecationWarning)  # it is about the threads of BLAS
            pid = os.fork()
            if pid == 0:
                stack.pop_all()  # what `os.register_at_fork` has made of warnings stays
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if pid != 0:
        return Copy(pid)
    try:
        end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        _take_files(stdin, stdout, pass_fds)
        _forget_the_launcher(environ, words)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        with suppress(SystemExit):  # of code 0: any other has ended the process
            run_program(words)
        # As Python ends: threads are waited for, then `atexit` and what C libraries have registered.
        ctypes.pythonapi.Py_Exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _take_files(stdin: int, stdout: int, pass_fds: Collection[int]) -> None:
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    for number in {int(each) for each in os.listdir("/proc/self/fd")} - {0, 1, 2, *pass_fds}:
        with suppress(OSError):
            os.close(number)
    # As a new Python makes them: buffered, unless it is asked not to, where there is no terminal.
    before = sys.__stdout__
    at_once = bool(os.environ.get("PYTHONUNBUFFERED")) or (before is not None and before.write_through)
    encoding, errors = ("utf-8", "strict") if before is None else (before.encoding, before.errors)
    sys.stdin = os.fdopen(0, encoding=encoding, errors=errors, closefd=False)
    output = os.fdopen(1, "w", 1 if os.isatty(1) else -1, encoding=encoding, errors=errors, closefd=False)
    output.reconfigure(write_through=at_once)
    sys.stdout = output


def _forget_the_launcher(environ: Mapping[str, str], words: Sequence[str]) -> None:
    """Drop what a new Python would not have: the launcher's signal handlers, hooks, and draws."""
    for number in ENDING:
        if callable(signal.getsignal(number)):  # not of one that is ignored, as SIGHUP is under nohup
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.excepthook = sys.__excepthook__
    os.environ.clear()
    os.environ.update(environ)
    if words[0] == "-m":  # it is to run again, as the main module
        sys.modules.pop(f"{words[1]}.__main__" if hasattr(sys.modules.get(words[1]), "__path__") else words[1], None)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # `random` does so by itself; torch begins with one seed in all processes
