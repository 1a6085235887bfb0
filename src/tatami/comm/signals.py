"""Requests to end: Ctrl-C, SIGTERM and SIGHUP, as an exception or as something that a loop looks at."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Never, final

_ENDING = (signal.SIGTERM, signal.SIGHUP)
INTERRUPT_PATIENCE_S = 2.0
"""After Ctrl-C, which a terminal sends to all processes of a job; those that still run then are asked to end."""
STOP_PATIENCE_S = 10.0
"""For ranks that were asked to end and save their work first."""


@contextmanager
def ending_as_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, unless the program handles them itself."""
    with _handled(_ENDING, _end):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is inside runs to its end; a signal that comes meanwhile acts afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDING))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        with _handled((signal.SIGINT, *_ENDING), lambda number, _frame: request.note(number)):
            yield request
    finally:
        request.close()


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle those of the signals for which nothing else was asked, where Python handles signals: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = (signal.SIG_DFL, signal.default_int_handler)
    replaced = {number: before for number in numbers if (before := signal.getsignal(number)) in usual}
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)


def _end(number: int, _frame: FrameType | None) -> Never:
    raise SystemExit(128 + number)
