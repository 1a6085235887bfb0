"""One test body, many worlds of ranks: a pytest plugin.

A test author writes what one rank does, and asks for the fixture `world`:

    def test_sums_ranks(world):
        def body(comm):
            tensor = torch.tensor([comm.rank])
            comm.allreduce(tensor)
            return tensor.item()

        assert world(body) == [sum(range(world.size))] * world.size

`world(body)` runs `body` on every rank and returns what the ranks returned, in their order. The test runs once for each number
of ranks, 1, 2, 3 and 4 unless it says otherwise: `@pytest.mark.ranks(2, 3)`. Under plain pytest the ranks are threads. Under
one of

    mpiexec -n 3 python -m pytest -m mpi --world=mpi
    torchrun --nproc-per-node 3 -m pytest -m mpi --world=torchrun

every rank runs pytest, on the tests for exactly 3 ranks. Each call of `world` then gets a communicator of its own, the ranks
exchange their outcomes so that all pass or fail together, with the traceback of each rank that failed, and only rank 0 reports.
`@pytest.mark.threads_only` keeps a test from processes: one that leaves transfers unfinished, or counts threads.

In a body: assert as usual; seed a `torch.Generator` of your own, because threads share torch's global one; use no fixture that
other ranks would change. As processes, hypothesis draws the same examples on all ranks (profile `ranks`, derandomized).
A wait of `WORLD_TIMEOUT_S` ends with an error that names the operation; a test that hangs elsewhere ends by pytest-timeout.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from tatami.comm.base import AbstractCommunicator
from tatami.comm.detect import init
from tatami.comm.threads import run_threads
from tatami.errors import CommTimeoutError, RankDiedError

Result = TypeVar("Result")
Body = Callable[[AbstractCommunicator], Result]

DEFAULT_SIZES = (1, 2, 3, 4)
WORLDS = {"threads": "threads", "mpi": "mpi", "torchrun": "tcp"}
"""What the ranks of a world can be, and the backend of each."""
WORLD_TIMEOUT_S = 200.0
"""Only ends what hangs: on a machine with ten jobs for each core, a start that takes 2 s takes 20 s or more."""
EXCHANGE_TIMEOUT_S = 600.0
"""For the exchange of outcomes: a rank that waits for one that failed comes only after `WORLD_TIMEOUT_S`."""


class World:
    """Runs a body on `size` ranks; `kind` is one of `WORLDS`."""

    def __init__(self, *, size: int, kind: str) -> None:
        self.size = size
        self.kind = kind

    def __call__(self, body: Body[Result], *, timeout_s: float = WORLD_TIMEOUT_S) -> list[Result]:
        """What `body` returned on every rank.

        Raises:
            Exception: what the first rank that failed raised; of processes on all, with the tracebacks of those that failed.
        """
        if self.kind == "threads":
            return run_threads(body, size=self.size, timeout_s=timeout_s)
        return _run_on_processes(body, kind=self.kind, timeout_s=timeout_s)


def _run_on_processes(body: Body[Result], *, kind: str, timeout_s: float) -> list[Result]:
    everyone = _everyone(kind)
    comm = everyone.duplicate()
    comm.timeout_s = timeout_s
    result, failure = None, None
    try:
        result = body(comm)
    except Exception as error:
        failure = _Failure(
            rank=everyone.rank,
            error=error if _survives_pickling(error) else AssertionError(f"{type(error).__name__}: {error}"),
            trace=traceback.format_exc(),
            is_consequence=isinstance(error, CommTimeoutError | RankDiedError),
        )
    outcomes = everyone.allgather_object((result, failure))
    comm.close()
    failures = [failed for _, failed in outcomes if failed is not None]
    if failures:
        cause = min(failures, key=lambda failed: (failed.is_consequence, failed.rank))
        for failed in failures:
            cause.error.add_note(f"rank {failed.rank} of {everyone.size}:\n{failed.trace}")
        raise cause.error
    return [outcome for outcome, _ in outcomes]


def _everyone(kind: str) -> AbstractCommunicator:
    """All ranks of the job, for what concerns the tests and not their bodies."""
    return init(backend=WORLDS[kind], timeout_s=EXCHANGE_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """How a body ended on one rank; a consequence is an error that says that another rank did not do its part."""

    rank: int
    error: Exception
    trace: str
    is_consequence: bool


def _survives_pickling(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


_FAILED = pytest.StashKey[dict[str, str]]()
"""The output of each test that failed in this process."""


# -- the plugin -----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--world", choices=tuple(WORLDS), default="threads", help="what the ranks of the fixture `world` are")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): numbers of ranks on which a test with the fixture `world` runs")
    config.addinivalue_line("markers", "mpi: runs under mpiexec too (given to all tests with the fixture `world`)")
    config.addinivalue_line("markers", "threads_only: does not run on ranks that are processes")
    if (kind := config.getoption("world")) != "threads":
        _draw_the_same_examples()
        config.stash[_FAILED] = {}
        config.pluginmanager.register(_FailureNotes(config.stash[_FAILED]))
        if _everyone(kind).rank != 0:
            _be_silent(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("ranks")
    sizes = marker.args if marker is not None else DEFAULT_SIZES
    metafunc.parametrize("world", sizes, ids=[f"n{size}" for size in sizes], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "world" in getattr(item, "fixturenames", ()) and item.get_closest_marker("threads_only") is None:
            item.add_marker("mpi")
    if (kind := config.getoption("world")) != "threads":
        size = _everyone(kind).size
        selected = [item for item in items if item.get_closest_marker("mpi") and _num_ranks(item) == size]
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = selected


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ranks leave together: one that ends with a failure ends all, and rank 0 has still to report, also for others alone."""
    if (kind := config.getoption("world")) != "threads":
        everyone = _everyone(kind)
        failed_on = everyone.allgather_object(config.stash[_FAILED])
        if everyone.rank == 0:
            for rank, failed in enumerate(failed_on):
                for test in [each for each in failed if each not in failed_on[0]]:
                    print(f"{test} failed on rank {rank} of {everyone.size} and not on rank 0:\n{failed[test]}")
            config.get_terminal_writer().flush()
            sys.stdout.flush()
        everyone.barrier()  # the first that ends with a failure ends all


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Ranks to run a body on; see the head of `tatami.testing.worlds`."""
    return World(size=request.param, kind=request.config.getoption("world"))


class _FailureNotes:
    """Keeps the text of what failed in this process."""

    def __init__(self, text_of: dict[str, str]) -> None:
        self._text_of = text_of

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._text_of[report.nodeid] = report.longreprtext


def _num_ranks(item: pytest.Item) -> int:
    size = getattr(item, "callspec").params["world"]  # noqa: B009 -- pytest types it on functions only
    assert isinstance(size, int)
    return size


def _be_silent(config: pytest.Config) -> None:
    """Rank 0 tells the outcome of all ranks; the others would tell it again."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 -- open until the process ends


def _draw_the_same_examples() -> None:
    try:
        from hypothesis import settings
    except ImportError:
        return
    settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
    settings.load_profile("ranks")
