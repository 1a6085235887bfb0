"""The process that starts runs: it loads SimGrid once, then forks for each job that it is sent.

Where several runs have one platform, a fork of it, the keeper, builds that once; runs are forks of the keeper then. Building
100,000 hosts takes SimGrid half a minute.

Messages are pickles, over pipes that only this program and the processes that it started can write to. Nothing is ever
unpickled that came from a file or a network.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn

from tatami.errors import MissingExtraError, SimulationError
from tatami.sim.engine import simgrid
from tatami.sim.platforms.base import AbstractPlatform
from tatami.sim.stage import build

_PR_SET_PDEATHSIG = 1
_GC_THRESHOLD = 100_000
"""New objects between two looks for cycles. A run makes very many, few in cycles; with Python's 700, a sixth is looking."""


def main(parent: int) -> None:
    """Serve jobs from stdin until it is closed: (function, argument, platform or None).

    Each is answered by ("value", what the function said), ("raised", an error), or ("died", (exit code, last words)).
    """
    _end_with(parent)
    jobs = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what is printed must not be taken for an answer
    _load_quietly()
    keeper: _Keeper | None = None
    while True:
        try:
            function, argument, platform = jobs.recv()
        except EOFError:
            return
        if platform is None:
            answers.send(_forked(function, argument))
            continue
        if keeper is not None and keeper.platform != platform:
            keeper.end()
            keeper = None
        if keeper is None:
            keeper = _Keeper(platform)
        try:
            answer = keeper.ask(function, argument)
        except (EOFError, OSError):  # the platform cannot be built
            answer, keeper = ("died", keeper.last_words()), None
        answers.send(answer)


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


class _Keeper:
    """A process in which a platform is built, and from which runs on it are forked."""

    def __init__(self, platform: AbstractPlatform) -> None:
        self.platform = platform
        jobs, self._jobs = Pipe(duplex=False)
        self._answers, answers = Pipe(duplex=False)
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process lives

        def keep() -> NoReturn:
            self._jobs.close()
            self._answers.close()
            _keep(platform, jobs, answers)

        self._pid = _fork(keep, words=self._words)
        jobs.close()
        answers.close()

    def ask(self, function: Any, argument: Any) -> tuple[str, Any]:
        """The answer to a job.

        Raises:
            EOFError, OSError: the keeper has died.
        """
        self._jobs.send((function, argument))
        kind, value = self._answers.recv()
        return kind, value

    def end(self) -> None:
        """End it; nothing runs in it now."""
        os.kill(self._pid, signal.SIGKILL)
        self.last_words()

    def last_words(self) -> tuple[int, str]:
        """Exit code and words, once it has died or is about to."""
        self._jobs.close()
        self._answers.close()
        with self._words:
            return _end_of(self._pid, self._words)


def _keep(platform: AbstractPlatform, jobs: Connection, answers: Connection) -> NoReturn:
    error: Exception | None = None
    try:
        build(platform)
    except Exception as raised:  # it belongs to the runs, each of which would have met it
        error = _portable(raised)
    while True:
        try:
            function, argument = jobs.recv()
        except EOFError:
            os._exit(0)
        answers.send(_forked(function, argument) if error is None else ("raised", error))


def _fork(body: Callable[[], NoReturn], *, words: IO[bytes]) -> int:
    """The process id of a fork that writes to `words`, and ends with this process."""
    process = os.getpid()
    child = os.fork()
    if child == 0:
        _end_with(process)
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
        body()
    return child


def _end_of(pid: int, words: IO[bytes]) -> tuple[int, str]:
    """Exit code and words of a process that has died or is about to."""
    _, status = os.waitpid(pid, 0)
    words.seek(0)
    return os.waitstatus_to_exitcode(status), words.read().decode(errors="replace")


def _forked(function: Any, argument: Any) -> tuple[str, Any]:
    """Run in a fork: what it answers, or how it died and what it wrote."""
    told, tells = Pipe(duplex=False)

    def run() -> NoReturn:
        told.close()
        _run(function, argument, tells)

    with tempfile.TemporaryFile() as words:
        child = _fork(run, words=words)
        tells.close()
        with told:
            try:
                kind, value = told.recv()
            except (EOFError, OSError):  # it died before it answered, or while it did
                return "died", _end_of(child, words)
        os.waitpid(child, 0)
        return kind, value


def _run(function: Any, argument: Any, answer: Connection) -> NoReturn:
    _stay()
    gc.freeze()  # what is there already stays to the end
    gc.set_threshold(_GC_THRESHOLD)
    try:
        answer.send(("value", function(argument)))
    except Exception as error:  # it is raised where this run was asked for
        answer.send(("raised", _portable(error)))
    # The interpreter's own exit would wait for SimGrid's actors, which are threads that never end.
    os._exit(0)


def _stay() -> None:
    """Stay on the core that the system has found for this fork.

    SimGrid and its actors are threads that take turns, at every call. On one core that is two to three times as fast.
    """
    core = ctypes.CDLL(None).sched_getcpu()
    if core >= 0:
        os.sched_setaffinity(0, {core})


def _portable(error: Exception) -> Exception:
    """The error itself if it survives being sent to another process; otherwise a `SimulationError` with its class and text.

    An exception is pickled as its class and its arguments, and is built from them again. A constructor that takes other
    arguments than it passes on may then raise anything, so every exception is caught here. Nothing is lost: the text travels.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return SimulationError(f"{type(error).__name__}: {error}")
    return error


def _end_with(parent: int) -> None:
    """End when `parent` does, also when it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
