"""`tatami bench allreduce`: every algorithm, MPI's own and gloo's all-reduce, in one run, in turn, by message size.

All work in place on float32; Tatami's are `AllReduce` objects, whose buffers are the windows. Each contestant's sum is checked
before it is timed. A time is that of the slowest rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tatami.bench.interleaved import Contestant, measured, message_record, store_of_one_host, times
from tatami.collective import ALGORITHMS, SizeTimings, TuningTable
from tatami.comm.allreduce import AUTO, AllReduce, AllReduceSpec
from tatami.comm.base import AbstractCommunicator
from tatami.comm.mpi import MpiCommunicator
from tatami.comm.tuning import candidates, fingerprint_of, keep_table, split_name
from tatami.errors import CommError, InputError

KIB, MIB = 1024, 1024**2
SIZES_BYTES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MPI, GLOO = "mpi", "gloo"
RIVALS = (MPI, GLOO)
ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class AllReduceBenchmark:
    """What is measured.

    Attributes:
        sizes_bytes: of the messages; rounded down to whole float32.
        algorithms: names as in the tuning table (`hierarchical+native`), `auto`, `mpi` and `gloo`; none: all that can run.
        rounds: timings of each, whose median counts.
        seconds: about how long one timing takes; a slow all-reduce is timed once at least.
    """

    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    algorithms: tuple[str, ...] = ()
    rounds: int = 7
    seconds: float = 0.02

    def check(self) -> None:
        """
        Raises:
            InputError: a size below one element, or an unknown name.
        """
        for size_bytes in self.sizes_bytes:
            if size_bytes < ELEMENT_BYTES:
                raise InputError(f"a message has at least {ELEMENT_BYTES} bytes, one float32; not {size_bytes}")
        for name in self.algorithms:
            if name not in (AUTO, *RIVALS) and split_name(name)[0] not in ALGORITHMS:
                raise InputError(f"there is no all-reduce {name!r}; choose one of: {AUTO}, {', '.join((*RIVALS, *ALGORITHMS))}")


def bench_allreduce(benchmark: AllReduceBenchmark, comm: AbstractCommunicator) -> Iterator[dict[str, Any]]:
    """One record for each algorithm and size, by rising size; the same on every rank. Collective.

    Keys: `benchmark`, `algorithm`, `ranks`, `hosts`, `size_bytes`, `median_s`, `spread` ((slowest - fastest round) / median),
    `bandwidth_bytes_per_s` (size over median), and of `auto` what was `chosen`.

    Raises:
        InputError: as `AllReduceBenchmark.check`.
        CommError: a contestant's sum is wrong.
    """
    benchmark.check()
    names = benchmark.algorithms or (AUTO, *RIVALS, *candidates(comm, hosts=comm.hosts))
    if not isinstance(comm, MpiCommunicator):
        names = tuple(name for name in names if name not in RIVALS)
    gloo = _gloo(comm) if GLOO in names else None
    for size_bytes in sorted(set(benchmark.sizes_bytes)):
        size = size_bytes // ELEMENT_BYTES
        made: dict[str, AllReduce] = {}
        contestants: dict[str, Contestant] = {}
        for name in names:
            if name in RIVALS:
                tensor = torch.empty(size)
                run = _mpi(comm, tensor) if name == MPI else _gloo_run(gloo, tensor)
            else:
                algorithm, across = split_name(name)
                made[name] = AllReduce(comm, AllReduceSpec(size=size, algorithm=algorithm, across=across))
                tensor, run = made[name].buffer, made[name].run
            _check(name, tensor, run, comm)
            contestants[name] = times(run)
        timed = measured(contestants, comm, rounds=benchmark.rounds, seconds=benchmark.seconds)
        for name, seconds in timed.items():
            chosen = {"chosen": _told(made[name])} if name == AUTO else {}
            yield {
                "benchmark": "allreduce",
                "algorithm": name,
                **message_record(comm, seconds, size_bytes=size_bytes),
                **chosen,
            }
        contestants.clear()
        for reduce in made.values():
            reduce.close()


def tune(records: Sequence[dict[str, Any]], comm: AbstractCommunicator) -> tuple[TuningTable, Path]:
    """The table of this cluster from the records of `bench_allreduce`, kept for later runs; and its file. Collective."""
    timings: dict[int, dict[str, float]] = {}
    for record in records:
        if record["algorithm"] not in (AUTO, *RIVALS):
            timings.setdefault(record["size_bytes"], {})[record["algorithm"]] = record["median_s"]
    table = TuningTable(
        fingerprint=fingerprint_of(comm),
        timings=tuple(SizeTimings(size_bytes=size_bytes, seconds=seconds) for size_bytes, seconds in sorted(timings.items())),
    )
    return table, keep_table(comm, table)


def _check(name: str, tensor: torch.Tensor, run: Callable[[], object], comm: AbstractCommunicator) -> None:
    """Sum 1 + 2 + ... + P once; leaves zeros, which stay what they are however often they are summed."""
    tensor.fill_(comm.rank + 1)
    run()
    want = comm.size * (comm.size + 1) // 2
    wrong = int((tensor != want).sum())
    if wrong:
        size = tensor.numel()
        raise CommError(f"{name} on rank {comm.rank} of {comm.size}: {wrong} of {size} sums are not {want}")
    tensor.zero_()


def _told(reduce: AllReduce) -> str:
    return reduce.algorithm + (f"+{reduce.spec.across}" if reduce.algorithm == "hierarchical" else "")


def _mpi(comm: AbstractCommunicator, tensor: torch.Tensor) -> Callable[[], object]:
    """MPI_Allreduce itself, blocking, in place."""
    assert isinstance(comm, MpiCommunicator)
    handle, in_place, op = comm.handle, comm.mpi.IN_PLACE, comm.mpi.SUM
    buffer = [tensor.numpy(), comm.mpi.FLOAT]
    return lambda: handle.Allreduce(in_place, buffer, op)


def _gloo_run(group: Any, tensor: torch.Tensor) -> Callable[[], object]:
    return lambda: group.allreduce([tensor]).wait()


def _gloo(comm: AbstractCommunicator) -> Any:
    """A gloo group over the ranks of `comm`, beside other uses of torch.distributed."""
    distributed: Any = torch.distributed  # its stubs leave out internal names
    timeout = timedelta(seconds=comm.timeout_s)
    if len(set(comm.hosts)) == 1:
        store = store_of_one_host(comm)
        device = distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    else:
        store, host = None, socket.gethostname()
        if comm.rank == 0:
            store = distributed.TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False, timeout=timeout)
        place = comm.bcast_object((host, store.port) if store is not None else None)
        store = store or distributed.TCPStore(*place, comm.size, is_master=False, timeout=timeout)
        device = distributed.ProcessGroupGloo.create_default_device()
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = timeout
    return distributed.ProcessGroupGloo(store, comm.rank, comm.size, options)
