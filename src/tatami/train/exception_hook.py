"""An exception that nobody catches ends all ranks, where `tatami.init` has not seen to it already.

`tatami.init` does so when it starts MPI, and `tatami run` for whatever it starts. What is left are programs that started MPI
themselves, say by `from mpi4py import MPI`, before they called `tatami.init`.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from tatami.comm.session import stop_on_failure


def add_exception_hook() -> None:
    """From now on an uncaught exception, in any thread, is printed with the number of its rank and ends all ranks."""
    sys.excepthook = _stop
    threading.excepthook = _stop_from_thread


def _stop(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    stop_on_failure(error, trace=trace)


def _stop_from_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and args.exc_type is not SystemExit:
        thread = f" in thread {args.thread.name!r}" if args.thread is not None else ""
        stop_on_failure(args.exc_value, trace=args.exc_traceback, thread=thread)
