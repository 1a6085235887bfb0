"""One clean process for every run: SimGrid has one engine a process, and what is wrong with a platform ends the process.

A few children are started, each of which has loaded SimGrid and does nothing but fork: a run costs milliseconds to start,
begins in the same state whichever child it comes from, and its result depends on nothing but its arguments.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tatami.errors import SimulationError
from tatami.sim.engine import require_simgrid

if TYPE_CHECKING:
    from tatami.sim.platforms.base import AbstractPlatform

Job = TypeVar("Job")
Result = TypeVar("Result")

_LAST_WORDS = 2000
"""Characters of what a run that died wrote last."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    index: int
    deadline_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    jobs: Connection
    answers: Connection


class Runs:
    """Child processes in which runs take place, at most `cores` at a time; to be used in a `with`.

    Raises:
        MissingExtraError: SimGrid is not installed.
    """

    def __init__(self, *, cores: int | None = None) -> None:
        require_simgrid()
        self._cores = cores or len(os.sched_getaffinity(0))
        self._idle: list[_Child] = []
        self._busy: dict[_Child, _Order] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all children, and the runs in them."""
        for child in [*self._idle, *self._busy]:
            child.process.kill()
            child.process.wait()
            child.jobs.close()
            child.answers.close()
        self._idle, self._busy = [], {}

    def map(
        self,
        function: Callable[[Job], Result],
        jobs: Sequence[Job],
        *,
        timeout_s: float = 3600.0,
        done: Callable[[int, Result], None] | None = None,
        platform: Callable[[Job], AbstractPlatform] | None = None,
    ) -> list[Result]:
        """`function` of every job, each in a process of its own.

        Args:
            function: of a module, not a lambda: it is found by its name.
            jobs: each is sent to the process that runs it.
            timeout_s: that one run may take.
            done: called for each job as it ends, by its index; not in order.
            platform: that a job plays on: it is built once for jobs that have the same, as long as no other comes between.
                None: each run builds its own.

        Returns:
            The results, in the order of the jobs.

        Raises:
            SimulationError: a run's process died, or ran past its time; what `function` raised itself is raised as it is.
        """
        results: dict[int, Result] = {}
        waiting = list(reversed(range(len(jobs))))
        try:
            while waiting or self._busy:
                while waiting and len(self._busy) < self._cores:
                    index = waiting.pop()
                    child = self._idle.pop() if self._idle else _start()
                    self._busy[child] = _Order(index=index, deadline_s=time.monotonic() + timeout_s)
                    built = None if platform is None else platform(jobs[index])
                    child.jobs.send((function, jobs[index], built))
                for child in self._ready(timeout_s):
                    order = self._busy.pop(child)
                    results[order.index] = _outcome(child)
                    self._idle.append(child)
                    if done is not None:
                        done(order.index, results[order.index])
        except BaseException:
            self.close()  # nothing waits any more for what is still running
            raise
        return [results[index] for index in range(len(jobs))]

    def call(self, function: Callable[[Job], Result], job: Job, *, timeout_s: float = 3600.0) -> Result:
        """`function` of one job, in a process of its own."""
        return self.map(function, [job], timeout_s=timeout_s)[0]

    def _ready(self, timeout_s: float) -> list[_Child]:
        remaining_s = min(order.deadline_s for order in self._busy.values()) - time.monotonic()
        found = wait([child.answers for child in self._busy], max(0.0, remaining_s))
        if not found:
            raise SimulationError(
                f"a simulated run took longer than {timeout_s:g} s and was ended; raise timeout_s, or simulate less at a time"
            )
        return [child for child in self._busy if child.answers in found]


def _start() -> _Child:
    # -m finds this package by the same path as this process did, also from another working directory.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tatami.sim.child", str(os.getpid())]
    its_jobs, jobs = Pipe(duplex=False)
    answers, its_answers = Pipe(duplex=False)
    with its_jobs, its_answers:
        process = subprocess.Popen(command, stdin=its_jobs.fileno(), stdout=its_answers.fileno(), env=environment)
    return _Child(process=process, jobs=jobs, answers=answers)


def _outcome(child: _Child) -> Any:
    try:
        kind, value = child.answers.recv()
    except (EOFError, OSError, pickle.UnpicklingError):
        raise SimulationError(f"the process that starts simulated runs ended with exit code {child.process.wait()}") from None
    if kind == "died":
        code, words = value
        raise SimulationError(f"a simulated run ended with {_how(code)}; it said: {words[-_LAST_WORDS:].strip() or 'nothing'}")
    if kind == "raised":
        raise value
    return value


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
