"""Requests to end (Ctrl-C, SIGTERM, SIGHUP), as an exception or as something that a loop looks at; ending with the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Never, final

_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal a process gets when its parent dies."""
_libc = ctypes.CDLL(None)
_ENDING = (signal.SIGTERM, signal.SIGHUP)
ENDING = (signal.SIGINT, *_ENDING)
INTERRUPT_PATIENCE_S = 2.0
"""After Ctrl-C, which a terminal sends to all processes of a job; those that still run then are asked to end."""
STOP_PATIENCE_S = 10.0
"""For ranks that were asked to end and save their work first."""


def end_with_parent() -> None:
    """From now on this process is killed when the one that started it ends, however that one ends; on Linux alone."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def ending_as_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, unless the program handles them itself.

    The exit code is 128 and the signal's number, also where a library in between, such as Ray, raises another SystemExit.
    """
    came: list[int] = []

    def end(number: int, _frame: FrameType | None) -> Never:
        came.append(number)
        raise SystemExit(128 + number)

    try:
        with _handled(_ENDING, end):
            yield
    except SystemExit:
        if came:
            raise SystemExit(128 + came[0]) from None
        raise


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is inside runs to its end; a signal that comes meanwhile acts afterwards.

    Signals are noted, as blocking them is not enough: the system gives a signal of the process to any thread that does not
    block it, such as those of BLAS. They are blocked too, for the sake of programs started inside, which inherit this.
    """
    came: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        with _handled(ENDING, lambda number, _frame: came.append(number), usual_only=False):
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


@final
class StopRequest:
    """Whether this program was asked to end; readable, for `select`, until it is pursued.

    Attributes:
        number: of the first signal that asked; None while there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._since_s = 0.0
        self._asked = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def note(self, number: int) -> None:
        """A signal has come."""
        if self.number is None:
            self.number, self._since_s = number, time.monotonic()
        with suppress(BlockingIOError):
            os.write(self._write, b"!")

    def pursue(self, *, ask: Callable[[], object], end: Callable[[], object]) -> None:
        """To be called again and again: first what runs is asked to end, once; what still runs after that is ended."""
        if self.number is None:
            return
        with suppress(BlockingIOError):
            os.read(self._read, 64)
        patience_s = INTERRUPT_PATIENCE_S if self.number == signal.SIGINT else 0.0
        waited_s = time.monotonic() - self._since_s
        if waited_s >= patience_s and not self._asked:
            self._asked = True
            ask()
        if waited_s >= patience_s + STOP_PATIENCE_S:
            end()

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Signals that would end this program are noted instead; a program that handles one itself keeps that right."""
    request = StopRequest()
    try:
        with _handled(ENDING, lambda number, _frame: request.note(number)):
            yield request
    finally:
        request.close()


@contextmanager
def _handled(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object], *, usual_only: bool = True
) -> Iterator[None]:
    """Handle the signals where Python handles them, in the main thread: all, or those for which nothing else was asked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = (signal.SIG_DFL, signal.default_int_handler)
    found = {number: before for number in numbers if (before := signal.getsignal(number)) is not None}
    replaced = {number: before for number, before in found.items() if before in usual or not usual_only}
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)
