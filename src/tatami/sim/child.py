"""The process that starts runs: it loads SimGrid once, then forks for each job that it is told of."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import tempfile
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

from tatami.errors import MissingExtraError, SimulationError
from tatami.sim.engine import simgrid
from tatami.sim.frames import read_frame, write_frame

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Serve jobs from stdin until it is closed: (function, argument), answered by ("value" | "raised" | "died", ...)."""
    _end_with(parent)
    jobs = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not be taken for an answer
    _load_quietly()
    while True:
        try:
            function, argument = read_frame(jobs)
        except EOFError:
            return
        write_frame(answers, _forked(function, argument))


def _load_quietly() -> None:
    """Load SimGrid, which says on stderr which settings it begins with."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        with suppress(MissingExtraError):  # said by the run that needs it
            simgrid()
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _forked(function: Any, argument: Any) -> tuple[str, Any]:
    """Run in a fork: what it answers, or how it died and what it wrote."""
    process = os.getpid()
    told, tells = os.pipe()
    with tempfile.TemporaryFile() as words:
        child = os.fork()
        if child == 0:
            os.close(told)
            _end_with(process)
            os.dup2(words.fileno(), 1)
            os.dup2(words.fileno(), 2)
            _run(function, argument, os.fdopen(tells, "wb"))
        os.close(tells)
        with os.fdopen(told, "rb") as answer:
            try:
                kind, value = read_frame(answer)
            except EOFError:
                kind = "died"
        _, status = os.waitpid(child, 0)
        if kind != "died":
            return kind, value
        words.seek(0)
        return kind, (os.waitstatus_to_exitcode(status), words.read().decode(errors="replace"))


def _run(function: Any, argument: Any, answer: BinaryIO) -> NoReturn:
    try:
        write_frame(answer, ("value", function(argument)))
    except Exception as error:  # it belongs to whoever asked for this run
        write_frame(answer, ("raised", _portable(error)))
    # Without the interpreter's farewell: SimGrid's actors are threads that would be waited for.
    os._exit(0)


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a constructor makes of the arguments
        return SimulationError(f"{type(error).__name__}: {error}")
    return error


def _end_with(parent: int) -> None:
    """End when `parent` does, be it killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
