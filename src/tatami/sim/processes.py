"""One clean process for every run: SimGrid has one engine a process, and what is wrong with a platform ends the process.

A few children are started, each of which has loaded SimGrid and does nothing but fork: a run costs milliseconds to start,
begins in the same state whichever child it comes from, and its result depends on nothing but its arguments.
"""

from __future__ import annotations

import os
import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from tatami.errors import SimulationError
from tatami.sim.engine import require_simgrid
from tatami.sim.frames import read_frame, write_frame

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


class Runs:
    """Child processes in which runs take place, at most `cores` at a time; to be used in a `with`.

    Raises:
        MissingExtraError: SimGrid is not installed.
    """

    def __init__(self, *, cores: int | None = None) -> None:
        require_simgrid()
        self._cores = cores or len(os.sched_getaffinity(0))
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: dict[subprocess.Popen[bytes], _Order] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all children, and the runs in them."""
        for child in [*self._idle, *self._busy]:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
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
                    write_frame(cast(Any, child.stdin), (function, jobs[index], built))
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

    def _ready(self, timeout_s: float) -> list[subprocess.Popen[bytes]]:
        with selectors.DefaultSelector() as selector:
            for child in self._busy:
                selector.register(cast(Any, child.stdout), selectors.EVENT_READ, child)
            remaining_s = min(order.deadline_s for order in self._busy.values()) - time.monotonic()
            found = selector.select(max(0.0, remaining_s))
        if not found:
            raise SimulationError(
                f"a simulated run took longer than {timeout_s:g} s and was ended; raise timeout_s, or simulate less at a time"
            )
        return [key.data for key, _ in found]


def _start() -> subprocess.Popen[bytes]:
    # -m finds this package by the same path as this process did, also from another working directory.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tatami.sim.child", str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _outcome(child: subprocess.Popen[bytes]) -> Any:
    try:
        kind, value = read_frame(cast(Any, child.stdout))
    except (EOFError, pickle.UnpicklingError):
        raise SimulationError(f"the process that starts simulated runs ended with exit code {child.wait()}") from None
    if kind == "died":
        code, words = value
        raise SimulationError(f"a simulated run ended with {_how(code)}; it said: {words[-_LAST_WORDS:].strip() or 'nothing'}")
    if kind == "raised":
        raise value
    return value


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
