"""`tatami bench put-vs-allgather`: the last phase of the torus, by one-sided puts and by all-gather (Tamura, Hanawa, Fig. 11).

All ranks are one row. Each begins with its own part of the message and ends with all of it. In the paper all-gather wins on
small messages, put on large ones, and the two cross at about 1 MByte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tatami.bench.allreduce import ELEMENT_BYTES, AllReduceBenchmark
from tatami.bench.interleaved import Contestant, measured, message_record, times
from tatami.collective import RankGroup
from tatami.collective.gathering import ALL_GATHER, PUTS, SHARED, gather_schedule
from tatami.comm.allreduce import executor_of
from tatami.comm.base import AbstractCommunicator
from tatami.comm.execute import Program
from tatami.comm.reduction import Reduction
from tatami.errors import CommError


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
