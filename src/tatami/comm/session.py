"""MPI's life in this process: started on demand, ended cleanly at exit, and stopped on all ranks when one of them fails."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType, TracebackType
from typing import Any, Never

from tatami.clock import Clock, SystemClock
from tatami.comm import guard
from tatami.comm.roll_call import AbstractRollCall
from tatami.comm.wait import WaitPolicy, wait_until
from tatami.errors import MissingExtraError

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")

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


def load_mpi() -> ModuleType:
    """`mpi4py.MPI`, initialised. What Tatami starts, Tatami ends; a program that started MPI itself keeps that right.

    Raises:
        MissingExtraError: mpi4py, or an MPI library for it, is not installed.
    """
    try:
        import mpi4py

        # Open MPI's windows over UCX hang now and then (5.0, two ranks of one host); those over its own transports do not.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(f"MPI for Python (mpi4py: {error})", extra="mpi") from error
    if not MPI.Is_initialized():
        # Any thread may wait or fail; the lock this needs inside MPI costs less than 0.1 us an operation.
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        guard.mark(b"+")
        add_exception_hook()
        atexit.register(_say_goodbye, MPI)
    return MPI


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
    guard.say_last(message)
    mpi = _running_mpi()
    if mpi is not None and guard.WATCHED not in os.environ:  # Abort has a line of its own to print
        mpi.COMM_WORLD.Abort(exit_code)
    os._exit(exit_code)


def stop_on_failure(error: BaseException, *, trace: TracebackType | None, thread: str = "") -> Never:
    """Print the traceback under the number of this rank, and end all ranks: they would wait for this one."""
    where = this_rank()
    lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip().splitlines()
    stop_all_ranks(
        "\n".join([f"{where} failed{thread}; all ranks are stopped:", *(f"[{where}] {line}" for line in lines)]),
        exit_code=130 if isinstance(error, KeyboardInterrupt) else 1,
    )


def _stop_on_exception(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    stop_on_failure(error, trace=trace)


def _stop_on_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and args.exc_type is not SystemExit:
        thread = f" in thread {args.thread.name!r}" if args.thread is not None else ""
        stop_on_failure(args.exc_value, trace=args.exc_traceback, thread=thread)


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
    wait_until(request.Test, policy=policy, timeout_s=float("inf"), clock=SystemClock(), doing=lambda: "the end of its script")
    mpi.Finalize()
    guard.mark(b"-")


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
