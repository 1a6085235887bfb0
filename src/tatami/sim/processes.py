"""Runs of the simulator on all cores: each in a process of a pool, its result a function of its arguments alone."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from tatami.errors import SimulationError

Job = TypeVar("Job")
Result = TypeVar("Result")

_GC_THRESHOLD = 100_000
"""New objects between two looks for cycles. A run makes very many, few in cycles; with Python's 700, a sixth is looking."""


class Runs:
    """At most `cores` runs at a time; to be used in a `with`. One run alone, or one core, takes place in this process."""

    def __init__(self, *, cores: int | None = None) -> None:
        self._cores = cores or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and the runs in them."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def map(
        self, function: Callable[[Job], Result], jobs: Sequence[Job], *, done: Callable[[int, Result], None] | None = None
    ) -> list[Result]:
        """`function` of every job.

        Args:
            function: of a module, not a lambda: it is found by its name.
            jobs: each is sent to the process that runs it.
            done: called for each job as it ends, by its index; not in order.

        Returns:
            The results, in the order of the jobs.

        Raises:
            SimulationError: a run's process died; what `function` raised itself is raised as it is.
        """
        results: dict[int, Result] = {}

        def ended(index: int, result: Result) -> None:
            results[index] = result
            if done is not None:
                done(index, result)

        if min(self._cores, len(jobs)) <= 1:
            for index, job in enumerate(jobs):
                ended(index, function(job))
        else:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(self._cores, multiprocessing.get_context("fork"), initializer=_begin)
            futures: dict[Future[Any], int] = {self._pool.submit(_run, function, job): index for index, job in enumerate(jobs)}
            try:
                for future in as_completed(futures):
                    ended(futures[future], future.result())
            except BrokenProcessPool as error:
                raise SimulationError("the process of a simulated run ended; is there enough memory?") from error
            finally:
                for future in futures:
                    future.cancel()
        return [results[index] for index in range(len(jobs))]


def _begin() -> None:
    gc.freeze()  # what is there already stays to the end
    gc.set_threshold(_GC_THRESHOLD)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed closes no pool: its processes would wait for another run forever, and hold what it had open."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(function: Callable[[Any], Any], job: Any) -> Any:
    """What `function` says, or an error that can travel: its class is built again from its arguments where it arrives."""
    try:
        return function(job)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise SimulationError(f"{type(error).__name__}: {error}") from None
        raise
