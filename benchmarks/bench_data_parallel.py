"""A step of data-parallel training, against torch's DistributedDataParallel over gloo:

    tatami run -n 2 benchmarks/bench_data_parallel.py

All train the same network from the same weights on the same samples, in turn, one thread a rank. The exposed part of
communication is what a step takes more than the same step without any, in the same round. That one ends when all ranks have
ended it: time in which the faster rank waits for the slower one is not communication.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed
from torch import nn

import tatami
from tatami.bench.interleaved import interleaved, machine, start_gloo
from tatami.comm.base import AbstractCommunicator
from tatami.parallel.data_parallel import DataParallel
from tatami.workload import parse_net

NETS = {"1M": "784-512-512-512-128", "25M": "784-2400-2400-2400-2400-2400-10"}
"""Networks of about 1 and 25 million parameters."""
COMPUTE = "compute"
TATAMI = "tatami"
DDP = "ddp-gloo"


@dataclass(frozen=True, kw_only=True)
class DataParallelBenchmark:
    """One network, on the ranks of a communicator.

    Attributes:
        net: sizes of the layers.
        batch_size: of each rank.
        rounds: timings of each contestant, whose median counts.
        repeats: steps in one timing.
    """

    net: str
    batch_size: int = 64
    rounds: int = 9
    repeats: int = 2


def bench_data_parallel(benchmark: DataParallelBenchmark, comm: AbstractCommunicator) -> list[dict[str, Any]]:
    """One record for each contestant: its step, and what of it is exposed communication. Collective; the same on all ranks."""
    sizes = parse_net(benchmark.net)
    torch.manual_seed(0)
    model = nn.Sequential()
    for inputs, outputs in pairwise(sizes):
        model.extend([nn.Linear(inputs, outputs), nn.ReLU()])
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.rand(benchmark.batch_size, sizes[0], generator=generator)
    y = torch.rand(benchmark.batch_size, sizes[-1], generator=generator)
    start_gloo(comm)
    ours = {
        TATAMI: DataParallel(copy.deepcopy(model), comm),
        f"{TATAMI}-bfloat16": DataParallel(copy.deepcopy(model), comm, wire=torch.bfloat16),
        f"{TATAMI}-one-step-stale": DataParallel(copy.deepcopy(model), comm, double_buffering=True),
    }
    models: dict[str, nn.Module] = {COMPUTE: copy.deepcopy(model), **ours}
    models[DDP] = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    try:
        contestants = {
            name: _steps(each, x, y, after=comm.barrier if name == COMPUTE else None) for name, each in models.items()
        }
        timed = interleaved(contestants, rounds=benchmark.rounds, repeats=benchmark.repeats, before=comm.barrier)
    finally:
        torch.distributed.destroy_process_group()
    for each in ours.values():
        each.close()
    # A step has ended when the slowest rank has; rounds are compared with themselves, because machines' speed drifts.
    rounds_s = {
        name: [max(ranks) for ranks in zip(*comm.allgather_object(each.seconds), strict=True)] for name, each in timed.items()
    }
    exposed_s = {
        name: median(step - compute for step, compute in zip(steps, rounds_s[COMPUTE], strict=True))
        for name, steps in rounds_s.items()
    }
    step_s = {name: median(steps) for name, steps in rounds_s.items()}
    return [
        {
            "benchmark": "dataparallel",
            **asdict(benchmark),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "ranks": comm.size,
            "threads_per_rank": torch.get_num_threads(),
            "contestant": name,
            "step_s": step_s[name],
            "spread": timed[name].spread,
            "exposed_s": exposed_s[name],
            "exposed_over_ddp": exposed_s[name] / exposed_s[DDP],
            "step_over_ddp": step_s[name] / step_s[DDP],
            "machine": machine(),
        }
        for name in models
    ]


def _steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, after: Callable[[], object] | None) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run(times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            loss: Any = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if after is not None:
                after()
            optimizer.step()

    return run


def main() -> None:
    os.environ.setdefault("TATAMI_THREADS", "1")
    comm = tatami.init()
    for net in NETS.values():
        records = bench_data_parallel(DataParallelBenchmark(net=net, rounds=21, repeats=3), comm)
        if comm.rank == 0:
            print("\n".join(json.dumps(record) for record in records), flush=True)


if __name__ == "__main__":
    main()
