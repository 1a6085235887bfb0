"""`tatami bench put-vs-allgather`: the last phase of the torus, by one-sided puts and by all-gather (Tamura, Hanawa, Fig. 11).

All ranks are one row. Each begins with its own part of the message and ends with all of it. In the paper all-gather wins on
small messages, put on large ones, and the two cross at about 1 MByte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tatami.bench.allreduce import ELEMENT_BYTES, AllReduceBenchmark
from tatami.bench.interleaved import Contestant
from tatami.bench.measuring import measured, message_record, times
from tatami.collective import AbstractPattern, Native, Phase, RankGroup, Role, Schedule, Sync, Via
from tatami.collective.direct import DirectAllGather
from tatami.collective.halving import Doubling
from tatami.comm.allreduce import executor_of
from tatami.comm.base import AbstractCommunicator
from tatami.comm.execute import Program
from tatami.comm.reduction import Reduction
from tatami.errors import CommError, InputError

ALL_GATHER = "allgather"
SHARED = "shared"
PUTS = {f"put-{sync.value}": sync for sync in Sync if sync.one_sided}


def bench_put(benchmark: AllReduceBenchmark, comm: AbstractCommunicator) -> Iterator[dict[str, Any]]:
    """One record for each way and size, the same on every rank. Collective.

    Ways: `allgather`, `put-fence`, `put-pscw`, `put-lock` (recursive doubling), and `shared` (loads) where all are on one host.
    `size_bytes` is that of the gathered message. `benchmark.algorithms` are not looked at.

    Raises:
        InputError: fewer than 2 ranks, or as `AllReduceBenchmark.check`.
        CommError: something else than the parts was gathered.
    """
    benchmark.check()
    if comm.size < 2:
        raise InputError("put and all-gather are between ranks; start at least 2")
    ways: dict[str, tuple[AbstractPattern | Native, Sync]] = {ALL_GATHER: (Native(role=Role.ALL_GATHER), Sync.ARRIVAL)}
    ways |= {name: (Doubling(via=Via.PUT), sync) for name, sync in PUTS.items()}
    if len(set(comm.hosts)) == 1:
        ways[SHARED] = (DirectAllGather(via=Via.LOAD), Sync.BARRIER)
    for size_bytes in sorted(set(benchmark.sizes_bytes)):
        size = size_bytes // ELEMENT_BYTES
        group = RankGroup(ranks=tuple(range(comm.size)), start=0, stop=size)
        programs: dict[str, Program] = {}
        contestants: dict[str, Contestant] = {}
        for name, (what, sync) in ways.items():
            programs[name] = _program(name, Phase(groups=(group,), what=what, sync=sync), comm, size=size)
            _check(name, programs[name], group, comm)
            contestants[name] = times(programs[name].run)
        timed = measured(contestants, comm, rounds=benchmark.rounds, seconds=benchmark.seconds)
        for name, seconds in timed.items():
            yield {"benchmark": "put-vs-allgather", "algorithm": name, **message_record(comm, seconds, size_bytes=size_bytes)}
        contestants.clear()
        for program in programs.values():
            program.close()


def crossover_bytes(records: Sequence[dict[str, Any]], *, way: str) -> int | None:
    """The smallest size from which on `way` is faster than all-gather at every size; None where it is not at the largest."""
    seconds = {(record["algorithm"], record["size_bytes"]): record["median_s"] for record in records}
    crossed = None
    for size_bytes in sorted({size_bytes for _, size_bytes in seconds}, reverse=True):
        if seconds[way, size_bytes] >= seconds[ALL_GATHER, size_bytes]:
            break
        crossed = size_bytes
    return crossed


def _program(name: str, phase: Phase, comm: AbstractCommunicator, *, size: int) -> Program:
    schedule = Schedule(
        algorithm=name, ranks=comm.size, size=size, phases=(phase,), order="nothing is summed", fixed_order=True
    )
    return executor_of(comm).prepare(schedule, dtype=torch.float32, reduction=Reduction.SUM)


def _check(name: str, program: Program, group: RankGroup, comm: AbstractCommunicator) -> None:
    program.vector.fill_(-1.0)
    start, stop = group.part(comm.rank)
    program.vector[start:stop] = comm.rank
    program.run()
    for member in range(comm.size):
        start, stop = group.part(member)
        if not torch.all(program.vector[start:stop] == member):
            raise CommError(f"{name} on rank {comm.rank} of {comm.size}: the part of rank {member} did not come")
