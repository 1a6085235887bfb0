"""Signals and a lab: a request to end becomes an exception, so that the lab is taken away, and that is not disturbed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Never

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_as_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, unless the program handles them itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is inside runs to its end; a signal that comes meanwhile acts afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDING))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(number: int, _frame: FrameType | None) -> Never:
    raise SystemExit(128 + number)
