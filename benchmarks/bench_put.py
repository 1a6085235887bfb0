"""The last phase of the torus, by one-sided puts and by all-gather (Tamura, Hanawa, Fig. 11), in turn:

    tatami run -n 4 benchmarks/bench_put.py

All ranks are one row. Each begins with its own part of the message and ends with all of it. In the paper all-gather wins on
small messages, put on large ones, and the two cross at about 1 MByte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import tatami
from tatami.bench.allreduce import ELEMENT_BYTES, AllReduceBenchmark
from tatami.bench.interleaved import Contestant, measured, message_record, times
from tatami.collective.direct import DirectAllGather
from tatami.collective.halving import Doubling
from tatami.collective.pattern import AbstractPattern, Native
from tatami.collective.schedule import Phase, Schedule
from tatami.collective.step import RankGroup, Role, Sync, Via
from tatami.comm.allreduce import executor_of
from tatami.comm.base import AbstractCommunicator
from tatami.comm.execute import Program
from tatami.comm.reduction import Reduction
from tatami.errors import CommError, InputError

ALL_GATHER, SHARED = "allgather", "shared"
PUTS = {f"put-{sync.value}": sync for sync in Sync if sync.one_sided}
_WAYS: Mapping[str, tuple[AbstractPattern | Native, Sync]] = {
    ALL_GATHER: (Native(role=Role.ALL_GATHER), Sync.ARRIVAL),
    **{way: (Doubling(via=Via.PUT), sync) for way, sync in PUTS.items()},
    SHARED: (DirectAllGather(via=Via.LOAD), Sync.BARRIER),
}


def gather_schedule(way: str, *, ranks: int, size: int) -> Schedule:
    """All ranks in one row gather a message of `size` elements, each its own part at first.

    No all-reduce: it ends with what each rank had in its part, everywhere.

    Args:
        way: `allgather`; `put-fence`, `put-pscw` or `put-lock` (recursive doubling); `shared` (loads), for ranks of one host.
        ranks: how many there are.
        size: elements of the gathered message.

    Raises:
        InputError: an unknown way, or fewer than 2 ranks.
    """
    if way not in _WAYS:
        raise InputError(f"there is no way {way!r} to gather; choose one of: {', '.join(_WAYS)}")
    if ranks < 2:
        raise InputError(f"put and all-gather are between ranks: at least 2, not {ranks}")
    what, sync = _WAYS[way]
    group = RankGroup(ranks=tuple(range(ranks)), start=0, stop=size)
    return Schedule(
        algorithm=way,
        ranks=ranks,
        size=size,
        phases=(Phase(groups=(group,), what=what, sync=sync),),
        order="nothing is summed",
        fixed_order=True,
    )


def crossover_bytes(seconds: Mapping[tuple[str, int], float], *, way: str) -> int | None:
    """The smallest size from which on `way` is faster than all-gather at every size; None where it is not at the largest.

    Args:
        seconds: by way and size in bytes.
        way: one of `PUTS`.
    """
    crossed = None
    for size_bytes in sorted({size_bytes for _, size_bytes in seconds}, reverse=True):
        if seconds[way, size_bytes] >= seconds[ALL_GATHER, size_bytes]:
            break
        crossed = size_bytes
    return crossed


def bench_put(benchmark: AllReduceBenchmark, comm: AbstractCommunicator) -> Iterator[dict[str, Any]]:
    """One record for each way and size, the same on every rank. Collective.

    Ways: `allgather`, `put-fence`, `put-pscw`, `put-lock` (recursive doubling), and `shared` (loads) where all are on one host.
    `size_bytes` is that of the gathered message. `benchmark.algorithms` are not looked at.

    Raises:
        InputError: fewer than 2 ranks, or as `AllReduceBenchmark.check`.
        CommError: something else than the parts was gathered.
    """
    benchmark.check()
    ways = [ALL_GATHER, *PUTS, *([SHARED] if len(set(comm.hosts)) == 1 else [])]
    for size_bytes in sorted(set(benchmark.sizes_bytes)):
        size = size_bytes // ELEMENT_BYTES
        programs: dict[str, Program] = {}
        contestants: dict[str, Contestant] = {}
        for name in ways:
            schedule = gather_schedule(name, ranks=comm.size, size=size)
            programs[name] = executor_of(comm).prepare(schedule, dtype=torch.float32, reduction=Reduction.SUM)
            _check(name, programs[name], schedule.phases[0].groups[0], comm)
            contestants[name] = times(programs[name].run)
        timed = measured(contestants, comm, rounds=benchmark.rounds, seconds=benchmark.seconds)
        for name, seconds in timed.items():
            yield {"benchmark": "put-vs-allgather", "algorithm": name, **message_record(comm, seconds, size_bytes=size_bytes)}
        contestants.clear()
        for program in programs.values():
            program.close()


def seconds_by_way(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Medians of the records of `bench_put`, by way and size, as `crossover_bytes` takes them."""
    return {(record["algorithm"], record["size_bytes"]): record["median_s"] for record in records}


def _check(name: str, program: Program, group: RankGroup, comm: AbstractCommunicator) -> None:
    program.vector.fill_(-1.0)
    start, stop = group.part(comm.rank)
    program.vector[start:stop] = comm.rank
    program.run()
    for member in range(comm.size):
        start, stop = group.part(member)
        if not torch.all(program.vector[start:stop] == member):
            raise CommError(f"{name} on rank {comm.rank} of {comm.size}: the part of rank {member} did not come")


def main() -> None:
    os.environ.setdefault("TATAMI_THREADS", "1")
    comm = tatami.init()
    records = []
    for record in bench_put(AllReduceBenchmark(), comm):
        records.append(record)
        if comm.rank == 0:
            print(json.dumps(record), flush=True)
    if comm.rank == 0:
        crossed = {way: crossover_bytes(seconds_by_way(records), way=way) for way in PUTS}
        print(json.dumps({"benchmark": "put-vs-allgather", "crossover_bytes": crossed}))


if __name__ == "__main__":
    main()
