"""Which ranks there are: `init` finds out how this process was started, and returns the communicator for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.comm.elastic import elastic_world
from tatami.comm.mpi import MpiCommunicator
from tatami.comm.ranks import DEFAULT_TIMEOUT_S
from tatami.comm.tcp import TcpCommunicator
from tatami.comm.threads import single_communicator, thread_communicator
from tatami.errors import InputError

THREADS_VARIABLE = "TATAMI_THREADS"

_MPI_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Set by the mpiexec of MPICH, of anything that speaks PMIx, of Open MPI, and of Intel MPI."""

_worlds: dict[str, AbstractCommunicator] = {}
"""The world of each backend, made once: `init` may be called again from anywhere."""


def init(*, backend: str | None = None, timeout_s: float | None = None) -> AbstractCommunicator:
    """The communicator of all ranks that were started together with this process.

    In an elastic run they are its members, under mpiexec or srun MPI's ranks, under torchrun those of torch.distributed, inside
    `run_threads` its threads, and otherwise this process alone. The first call also gives torch its number of threads: the
    cores of the host divided by the ranks on it, or `TATAMI_THREADS`.

    Args:
        backend: `mpi`, `tcp`, `threads` or `single`; None to find out.
        timeout_s: how long an operation may wait for another rank. None: as long as who started the ranks, or an earlier call,
            has said; 60 s where none has.

    Raises:
        InputError: an unknown backend; threads outside of `run_threads`; tcp without torchrun and without a process
            group; `TATAMI_THREADS` or `TATAMI_WAIT` is wrong; srun started several tasks that MPI does not connect.
        MissingExtraError: MPI is needed but not installed.
    """
    elastic = elastic_world()
    if elastic is not None and backend is None:
        _set_timeout(elastic, timeout_s)
        _set_torch_threads(threads_asked_for(os.environ), ranks_on_host=elastic.local_size)
        return elastic
    inside = thread_communicator()
    if backend is None:
        backend = "threads" if inside is not None else detect_backend(os.environ)
    if backend not in _MAKERS:
        raise InputError(f"there is no backend {backend!r}; choose one of: {', '.join(BACKENDS)}")
    if backend == "threads":
        if inside is None:
            raise InputError(
                "backend 'threads': this is not a rank of run_threads; start the ranks with "
                "tatami.comm.run_threads(body, size=4), or choose 'single' for one rank"
            )
        _set_timeout(inside, timeout_s)
        return inside
    num_threads = threads_asked_for(os.environ)
    if backend not in _worlds:
        _worlds[backend] = _MAKERS[backend](DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        refuse_lone_tasks(os.environ, size=_worlds[backend].size)
        _set_torch_threads(num_threads, ranks_on_host=_worlds[backend].local_size)
    _set_timeout(_worlds[backend], timeout_s)
    return _worlds[backend]


def _set_timeout(comm: AbstractCommunicator, timeout_s: float | None) -> None:
    if timeout_s is not None:
        comm.timeout_s = timeout_s


def detect_backend(environ: Mapping[str, str]) -> str:
    """`mpi`, `tcp` or `single`, from the variables that launchers set."""
    if any(name in environ for name in _MPI_VARIABLES):
        return "mpi"
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        return "mpi"
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "tcp"
    return "single"


def refuse_lone_tasks(environ: Mapping[str, str], *, size: int) -> None:
    """Refuse to train in each of several tasks of srun as if it were the only one.

    Raises:
        InputError: names the number of tasks, and how srun connects them.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")  # srun sets it, and a batch script has none
    of_mpiexec = environ.get("PMI_SIZE", environ.get("OMPI_COMM_WORLD_SIZE"))
    if size == 1 and tasks.isdecimal() and int(tasks) > 1 and of_mpiexec != "1":
        raise InputError(
            f"srun started {tasks} tasks, but MPI connects none of them: each would train alone, and write the same files. "
            "Give srun the interface that this MPI library speaks: srun --mpi=pmi2 or --mpi=pmix (srun --mpi=list shows which "
            "there are)"
        )


def threads_asked_for(environ: Mapping[str, str]) -> int | None:
    """The value of `TATAMI_THREADS`; None where it is not set.

    Raises:
        InputError: it is not a whole number of at least 1.
    """
    text = environ.get(THREADS_VARIABLE)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise InputError(f"{THREADS_VARIABLE}={text!r} is not a number of threads; give a whole number of at least 1")
    return int(text)


def _set_torch_threads(asked: int | None, *, ranks_on_host: int) -> None:
    """One rank alone keeps what torch chose; a user's OMP_NUM_THREADS is per rank already."""
    if asked is not None:
        torch.set_num_threads(asked)
    elif ranks_on_host > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_on_host))


_MAKERS: dict[str, Callable[[float], AbstractCommunicator]] = {
    "mpi": lambda timeout_s: MpiCommunicator.world(timeout_s=timeout_s),
    "tcp": lambda timeout_s: TcpCommunicator.world(timeout_s=timeout_s),
    "threads": lambda timeout_s: single_communicator(timeout_s=timeout_s),
    "single": lambda timeout_s: single_communicator(timeout_s=timeout_s),
}
BACKENDS = tuple(_MAKERS)
