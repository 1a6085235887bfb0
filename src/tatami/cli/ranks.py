"""Runs one command on several ranks, by starting it again under a launcher, where it detects that it is a rank."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import typer

from tatami.cli.terminal import environment_of_ranks, is_terminal, tell
from tatami.clock import SystemClock
from tatami.comm import BACKENDS, AbstractCommunicator, init, launch, run_threads
from tatami.comm.detect import detect_backend
from tatami.errors import InputError, shortened
from tatami.progress import Progress
from tatami.report.bar import BarProgress, progress_for

MOST_THREADS = 256
_SLOW_TO_LOAD = ("tatami.model.tile", "tatami.train.trainer", "torch._dynamo")
"""What takes a rank longest to load that trains a network, after torch."""

Result = TypeVar("Result")


def is_rank() -> bool:
    """Whether mpiexec, srun, torchrun or `on_ranks` started this process as one of several ranks."""
    return detect_backend(os.environ) != "single"


def check_backend(backend: str | None) -> None:
    """Check that there is a backend of this name.

    Raises:
        InputError: there is none; the message lists the known ones.
    """
    if backend is not None and backend not in BACKENDS:
        raise InputError(f"there is no backend {backend!r}; choose one of: {', '.join(BACKENDS)}")


def on_ranks(body: Callable[[AbstractCommunicator], Result], *, ranks: int, backend: str | None, hosts: str | None) -> Result:
    """Run `body` on every rank, and return its result on rank 0, or here on this rank.

    A rank runs it. A process that is not a rank starts ranks: as threads, as this process alone, or by calling the same command
    again under the MPI launcher; then this process ends when they do, with their exit code.

    Raises:
        InputError: an unknown backend, hosts for ranks of this process, or a number of ranks that is not the number that was
            started.
    """
    check_backend(backend)
    if hosts is not None and (is_rank() or backend in ("threads", "single")):
        where = f"backend {backend!r} runs" if backend in ("threads", "single") else "these ranks were started"
        raise InputError(f"--hosts {shortened(hosts)} starts ranks on other machines, but {where} here; leave one of them out")
    if is_rank():
        comm = init(backend=backend)
        if comm.size != ranks:
            raise InputError(f"{comm.size} ranks were started, but -n {ranks} was asked for; leave -n out or make them agree")
        return body(comm)
    if backend == "threads":
        if ranks > MOST_THREADS:
            raise InputError(f"{ranks} ranks are too many threads for one process; at most {MOST_THREADS}")
        return run_threads(body, size=ranks)[0]
    if backend == "single" and ranks > 1:
        raise InputError(f"backend 'single' is one rank, but -n {ranks} was asked for; choose mpi or threads")
    if backend == "tcp":
        raise InputError(
            f"backend 'tcp' is for ranks started by torchrun: torchrun --nproc-per-node {ranks} -m tatami "
            f"{' '.join(sys.argv[1:])}"
        )
    if backend != "mpi" and ranks == 1 and hosts is None:
        return body(init(backend="single"))
    os.environ.update(environment_of_ranks())
    code = start_ranks(["-m", "tatami", *sys.argv[1:]], ranks=ranks, hosts=hosts)
    raise typer.Exit(code)


def start_ranks(command: Sequence[str], *, ranks: int, hosts: str | None = None) -> int:
    """Return the exit code of `launch.run`, whose ranks may be copies of this process where `tatami` is all that it runs."""
    copies = hosts is None and _is_command()
    if copies and ranks > len(os.sched_getaffinity(0)):
        for name in _SLOW_TO_LOAD:  # once, in place of on each rank, where ranks would wait for each other's loading
            importlib.import_module(name)
    return launch.run(command, ranks=ranks, hosts=None if hosts is None else hosts.split(","), copies=copies)


def _is_command() -> bool:
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    return name == "tatami.__main__" or Path(getattr(main, "__file__", None) or "").name == "tatami"


def num_started() -> int | None:
    """Return the number of ranks that were started, on a rank; None elsewhere."""
    return init().size if is_rank() else None


def progress_of(comm: AbstractCommunicator) -> Progress | None:
    """Return a progress bar, or progress lines, on rank 0; None on others."""
    if comm.rank != 0:
        return None
    return BarProgress(sys.stderr, clock=SystemClock()) if is_terminal(sys.stderr) else progress_for()


def log_on_rank_0(comm: AbstractCommunicator) -> None:
    """Print the library's log to stderr on rank 0: the layout of the work, and the decision of every check of the balance."""
    logger = logging.getLogger("tatami")
    if comm.rank == 0 and not any(isinstance(handler, _TellHandler) for handler in logger.handlers):
        logger.setLevel(logging.INFO)
        logger.addHandler(_TellHandler())


class _TellHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tell(self.format(record), style="yellow" if record.levelno >= logging.WARNING else "dim")
