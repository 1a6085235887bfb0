"""Rounds of the parameter server that compute nothing, against the memory copies they need; then training against loops:

python benchmarks/bench_server.py
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from tatami.bench.interleaved import machine
from tatami.errors import InputError
from tatami.inputs import check_at_least
from tatami.server import SGD, Pool, RunContext, RunControl, RunSettings, engine, train

MB = 1_000_000
_COPY_BYTES = 100 * MB
UNCOUNTED = 2
"""Rounds of a run that are not counted: in them, memory is touched for the first time."""


@dataclass(frozen=True, kw_only=True)
class ServerBenchmark:
    """What is measured.

    Attributes:
        size_bytes: of the parameters that one round moves.
        rounds: of a block; the first two are not counted.
        blocks: with the bare copies between them, as the machine's own speed drifts.
    """

    size_bytes: int = 100 * MB
    workers: int = 4
    servers: int = 2
    rounds: int = 12
    blocks: int = 5

    def __post_init__(self) -> None:
        check_at_least(1, blocks=self.blocks)
        if self.rounds <= UNCOUNTED:
            raise InputError(
                f"rounds must be at least {UNCOUNTED + 1}, as the first {UNCOUNTED} are not counted; not {self.rounds}"
            )

    @property
    def copies(self) -> dict[str, int]:
        """Bytes that must be copied in a round, on whichever machine the parts are."""
        each = self.workers * self.size_bytes
        return {
            "gradients into shared memory": each,
            "gradients read and summed": each,
            "parameters into shared memory": self.size_bytes,
            "parameters into the models": each,
        }


def bench_round(benchmark: ServerBenchmark) -> dict[str, Any]:
    """Time rounds in which nothing is computed and the bare copies in turn, on the same processes; a record for JSON."""
    began_s = time.perf_counter()
    first_s: list[float] = []

    def note(run: RunControl) -> None:
        if not first_s:
            first_s.append(time.perf_counter() - run.report().reached_s[1])

    rates = [copy_bytes_per_s()]
    copied_s = time.perf_counter() - began_s
    blocks: list[list[float]] = []
    with engine():
        pool = Pool()
        for _ in range(benchmark.blocks):
            _, report = train(
                lambda: Weight(benchmark.size_bytes // 4),
                no_loss,
                dataset=(torch.zeros(benchmark.workers, 1), torch.zeros(benchmark.workers, 1)),
                settings=RunSettings(
                    rounds=benchmark.rounds,
                    batch_size=benchmark.workers,
                    workers=benchmark.workers,
                    servers=benchmark.servers,
                    spares=0,
                    optimizer=SGD(lr=0.1),
                    heartbeat_s=60.0,
                ),
                context=RunContext(on_round=note, pool=pool),
            )
            blocks.append(list(report.round_s[UNCOUNTED:]))
            rates.append(copy_bytes_per_s())
    needed = sum(benchmark.copies.values())
    bare_s = [2 * needed / sum(around) for around in pairwise(rates)]
    ratios = [statistics.median(rounds) / bare for rounds, bare in zip(blocks, bare_s, strict=True)]
    return {
        "what": "round",
        "size_bytes": benchmark.size_bytes,
        "workers": benchmark.workers,
        "servers": benchmark.servers,
        "rounds": benchmark.rounds - UNCOUNTED,
        "round_median_s": statistics.median(chain.from_iterable(blocks)),
        "round_s": blocks,
        "copies_bytes": benchmark.copies,
        "copy_bytes_per_s": rates,
        "bare_copies_s": statistics.median(bare_s),
        "round_over_bare_copies": statistics.median(ratios),
        "round_over_bare_copies_each": ratios,
        "start_to_first_round_s": first_s[0] - began_s - copied_s,
        "machine": machine(),
    }


def copy_bytes_per_s(*, repeats: int = 5) -> float:
    """Bytes copied in a second by as many threads as there are cores: what the machine does with nothing else to do."""
    cores = len(os.sched_getaffinity(0))
    pairs = [(np.zeros(_COPY_BYTES, dtype=np.uint8), np.ones(_COPY_BYTES, dtype=np.uint8)) for _ in range(cores)]
    for target, source in pairs:
        np.copyto(target, source)

    def copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        for _ in range(repeats):
            np.copyto(target, source)

    threads = [threading.Thread(target=copy, args=pair) for pair in pairs]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return cores * repeats * _COPY_BYTES / (time.perf_counter() - start_s)


class Weight(nn.Module):
    """One vector of parameters whose gradient lies ready.

    Args:
        elements: of float32.
        task_s: that a forward pass sleeps, in place of work.
    """

    def __init__(self, elements: int, *, task_s: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self._ready = np.full(elements, 1e-3, dtype=np.float32)
        self._task_s = task_s

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ARG002 - nothing is computed
        time.sleep(self._task_s)
        return _Gradient.apply(self.weight, self._ready)  # type: ignore[no-untyped-call]


def no_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - nothing is computed
    """The loss of a `Weight`."""
    return output


class _Gradient(torch.autograd.Function):
    """A sum whose gradient lies ready, so that nothing is computed and nothing is copied."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ready: np.ndarray[Any, Any]) -> torch.Tensor:
        ctx.ready = ready
        return weight[:1].sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(ctx.ready), None  # a new tensor, which autograd takes as it is


def main() -> None:
    from bench_server_loops import bench_throughput

    print(json.dumps(bench_round(ServerBenchmark())), flush=True)
    for record in bench_throughput():
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
