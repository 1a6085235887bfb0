"""MPI's life in this process: started on demand, ended cleanly at exit, and stopped on all ranks when one of them fails."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import os
import re
import signal
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType, TracebackType
from typing import Any, Never

from tatami.clock import Clock, SystemClock
from tatami.comm.stall_report import AbstractRollCall
from tatami.comm.wait import WaitPolicy, wait_until
from tatami.errors import MissingExtraError, shortened

_MPIEXEC_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_RANK_VARIABLES = (*_MPIEXEC_VARIABLES, "SLURM_PROCID")

WATCHED = "TATAMI_WATCHED"
"""The variable that is set where `tatami run` watches the ranks itself, so that the end of one is enough to end all: the number
of an open file in memory, `FAILURES`, in which ranks note by what they failed."""
FAILURES = "tatami-failures"
_MOST_FAILURES_BYTES = 1 << 16
_LOCK_TRIES, _LOCK_SLEEP_S = 100, 0.01
"""A rank that was stopped while it has the file locked keeps no other from its traceback."""
_PATIENCE_S = 2.0
"""For a launcher that does not read."""
_PASSING_ON_S = 0.1

START_TIMEOUT_S = 300.0
"""For the ranks that come last: they may load torch from a disk that many share."""
_STDERR = 2

_GOODBYE_POLICY = WaitPolicy(spin_s=0.0, longest_sleep_s=5e-3)
"""Nothing hurries at the end: other ranks may still compute, and should have the cores."""

_roll_call: AbstractRollCall | None = None

abandoned: list[tuple[list[Any], object]] = []
"""Requests whose wait timed out, with their tensors: MPI may still write there, so they must live as long as the process."""

_dropped: list[tuple[list[Any], object]] = []
"""The same of requests that nothing waits for any more."""
_MOST_DROPPED = 64
"""From so many on, those that have ended meanwhile are let go."""


def hold(requests: list[Any], tensors: object) -> None:
    """Keep the tensors of requests that were dropped, as by an error, until MPI is done with them."""
    if len(_dropped) >= _MOST_DROPPED and _running_mpi() is not None:
        _dropped[:] = [each for each in _dropped if not all(request.Test() for request in each[0])]
    _dropped.append((requests, tensors))


def load_mpi(*, timeout_s: float) -> ModuleType:
    """`mpi4py.MPI`, initialised. What Tatami starts, Tatami ends; a program that started MPI itself keeps that right.

    Args:
        timeout_s: how long this rank waits for others to start MPI, where it is more than `START_TIMEOUT_S`.

    Raises:
        MissingExtraError: mpi4py, or an MPI library for it, is not installed.
    """
    try:
        import mpi4py

        # Open MPI's windows over UCX hang now and then (5.0, two ranks of one host); those over its own transports do not.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
        # Messages that one process copies out of another's memory end the process (abort, segmentation fault) where they are
        # longer than the receiver expects. Without that copy it is an error, and messages of 16 KiB to 4 MiB take as long.
        os.environ.setdefault("OMPI_MCA_smsc", "^cma")
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"MPI for Python (mpi4py: {error})", extra="mpi") from error
    except (ImportError, RuntimeError) as error:
        said = f"mpi4py is installed, but the MPI library does not load: pip install mpich ({' '.join(str(error).split())})"
        raise MissingExtraError("MPI", extra="mpi", message=said) from error
    if not MPI.Is_initialized():
        # Any thread may wait or fail; the lock this needs inside MPI costs less than 0.1 us an operation.
        _meet_all_ranks_of_the_job(MPI, timeout_s=max(timeout_s, START_TIMEOUT_S))
        add_exception_hook()
        atexit.register(_say_goodbye, MPI)
    return MPI


def _meet_all_ranks_of_the_job(mpi: Any, *, timeout_s: float) -> None:
    """Start MPI, which waits until every rank has done so; end this process if one has not come within `timeout_s`.

    MPI waits in C and lets no other thread of Python run. The one of `faulthandler`, of which a process has one, needs none: it
    prints that the time is over and where this rank waited, which is why this function has the name that it has.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STDERR)
    try:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    finally:
        faulthandler.cancel_dump_traceback_later()


def say_goodbye_with(roll_call: AbstractRollCall) -> None:
    """Where this rank waits at its end for the others, it answers those who ask what it does."""
    global _roll_call
    _roll_call = roll_call


def add_exception_hook() -> None:
    """From now on an exception that is not caught, in any thread, is printed with the number of its rank and ends all ranks.

    `tatami.init` does it where it starts MPI, and `tatami run` for what it starts. It is for programs that started MPI
    themselves, say by `from mpi4py import MPI`, before they called `tatami.init`.
    """
    sys.excepthook = _stop_on_exception
    threading.excepthook = _stop_on_thread_exception


def this_rank() -> str:
    """How this process is called in messages, also before MPI is up."""
    mpi = _running_mpi()
    if mpi is not None:
        return f"rank {mpi.COMM_WORLD.Get_rank()} of {mpi.COMM_WORLD.Get_size()}"
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), None)
    return f"rank {rank}" if rank is not None else f"process {os.getpid()}"


def stop_all_ranks(message: str, *, exit_code: int = 1) -> Never:
    """Say `message` and end every rank of the job, this one included."""
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")  # at once, or lines of several ranks would run together
    sys.stderr.flush()
    _await_reader()
    if WATCHED not in os.environ:
        mpi = _running_mpi()
        if mpi is not None:
            mpi.COMM_WORLD.Abort(exit_code)
        if any(name in os.environ for name in _MPIEXEC_VARIABLES):
            # Before MPI is up, mpiexec ends the other ranks when this one ends by a signal, not when it ends by an exit code.
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(exit_code)


def stop_on_failure(error: BaseException, *, trace: TracebackType | None, thread: str = "") -> Never:
    """Print the traceback under the number of this rank, and end all ranks: they would wait for this one."""
    where = this_rank()
    lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip().splitlines()
    said = shortened(": ".join([type(error).__name__, *str(error).splitlines()[:1]]), longest=1000)
    # What the call of the user's was, and what to do, comes before what it waited for inside.
    notes = "".join(
        f"{note[:1].upper()}{note[1:].rstrip('.')}. " for note in getattr(error, "__notes__", ()) if "\n" not in note
    )
    text = [f"{where} failed{thread}; all ranks are stopped. {notes}{said}"]
    if _is_new(said):  # a mistake that all ranks make has one traceback
        text += [f"[{where}] {line}" for line in lines]
    stop_all_ranks("\n".join(text), exit_code=130 if isinstance(error, KeyboardInterrupt) else 1)


def _is_new(said: str) -> bool:
    """Whether no other rank that the same launcher watches has failed with these words, with whatever numbers."""
    said = re.sub(r"\d+", "0", said)
    try:
        failures = int(os.environ.get(WATCHED, ""))
        if FAILURES not in os.readlink(f"/proc/self/fd/{failures}"):  # a process that the rank has started has files of its own
            return True
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.lockf(failures, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes when this process ends
                break
            except BlockingIOError:
                time.sleep(_LOCK_SLEEP_S)
        else:
            return True
        before = os.pread(failures, _MOST_FAILURES_BYTES, 0).decode(errors="replace")
        os.pwrite(failures, f"{said}\n".encode(), len(before.encode()))
        fcntl.lockf(failures, fcntl.LOCK_UN)
    except (ValueError, OSError):
        return True
    return said not in before.splitlines()


def _stop_on_exception(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    stop_on_failure(error, trace=trace)


def _stop_on_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and args.exc_type is not SystemExit:
        thread = f" in thread {args.thread.name!r}" if args.thread is not None else ""
        stop_on_failure(args.exc_value, trace=args.exc_traceback, thread=thread)


def _await_reader() -> None:
    """Return when the launcher has read this process's output, and has had a moment to pass it on.

    MPI's launchers drop what they have not yet read of a rank's output when a rank aborts.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while any(_unread(output) for output in (1, 2)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(_PASSING_ON_S)


def _unread(output: int) -> bool:
    """Whether bytes wait in this pipe; False for anything other than a pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(output).st_mode):
            return False
        count = fcntl.ioctl(output, termios.FIONREAD, bytes(4))
    except OSError:
        return False
    return int.from_bytes(count, sys.byteorder) > 0


def takes_cuda(mpi: ModuleType) -> bool:
    """Whether the MPI library says that it takes CUDA memory (`MPIX_Query_cuda_support`, of Open MPI and MPICH alike)."""
    for library in (None, mpi.__file__):
        with suppress(OSError, AttributeError):
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
    return False


def _say_goodbye(mpi: ModuleType) -> None:
    """Meet all ranks before MPI_Finalize, which would spin on a core while the others still work."""
    if mpi.Is_finalized():
        return
    num_unfinished = sum(not request.Test() for requests, _ in abandoned for request in requests)
    if num_unfinished:
        stop_all_ranks(f"{this_rank()} ends with {num_unfinished} transfers that timed out; all ranks are stopped")
    request = mpi.COMM_WORLD.Ibarrier()
    policy = replace(_GOODBYE_POLICY, roll_call=_roll_call)
    wait_until(
        request.Test, policy=policy, timeout_s=float("inf"), clock=SystemClock(), doing=lambda: "MPI's end, after the script"
    )
    mpi.Finalize()


def _running_mpi() -> ModuleType | None:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


LOOK_S = 0.25
"""How often the thread looks: a timeout comes so much later at most."""


class Watchdog:
    """Watches one thread's blocking calls. Entering and leaving `watch` costs a fraction of a microsecond."""

    def __init__(self, *, clock: Clock | None = None, stop: Callable[[str], object] = stop_all_ranks) -> None:
        self._clock = clock or SystemClock()
        self._stop = stop
        self._watched: tuple[float, Callable[[], str]] | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, text: str, *, timeout_s: float, findings: Callable[[], str] = str) -> Iterator[None]:
        """End the job with `text`, and what is found out then, if the block takes longer than `timeout_s` seconds."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="tatami-watchdog", daemon=True)
            self._thread.start()
        self._watched = (
            self._clock.now_s() + timeout_s,
            lambda: " ".join([f"{text} did not return within {timeout_s:.3g} s; all ranks are stopped", findings()]).strip(),
        )
        try:
            yield
        finally:
            self._watched = None

    def _look(self) -> None:
        while True:
            watched = self._watched
            if watched is not None and self._clock.now_s() > watched[0]:
                self._stop(watched[1]())
                return
            self._clock.sleep(LOOK_S)


WATCHDOG = Watchdog()
