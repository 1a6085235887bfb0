"""CPU time of the looks by which a tiled model finds out what would train it otherwise than one machine would.

    python benchmarks/bench_checks.py

Two ranks, as threads, share the units of a GPT. Looks are at attributes, hooks and layers (every pass), at the graph of the
loss (the first passes and one of 50), and at what all ranks have (one of 64). One JSON line: microseconds of an iteration after
the first ten for each look, and all of them as a part of 50 ms.
"""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tatami
from tatami.comm.agreement import Watch
from tatami.comm.base import AbstractCommunicator
from tatami.comm.threads import run_threads
from tatami.gradients.outside_reads import OutsideReads
from tatami.partition.tracing.settings import ModuleSettings
from tatami.runtime.same_batch import BatchFacts

LAYERS, WIDTH, HEADS, TOKENS, BATCH = 12, 64, 4, 16, 8
FIRST, ITERATIONS = 10, 138
LOOKS = {
    "attributes, hooks and layers": (ModuleSettings, "refuse"),
    "graph of the loss": (OutsideReads, "look"),
    "batches": (BatchFacts, "announce"),
    "ranks": (Watch, "compare"),
}


class Clock:
    """Adds up the CPU time of methods, by thread."""

    def __init__(self) -> None:
        self.is_on = False
        self.seconds: dict[str, float] = defaultdict(float)

    def within(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                if self.is_on:
                    self.seconds[name] += time.thread_time() - began_s

        return timed


def network() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def train(comm: AbstractCommunicator, clock: Clock) -> float:
    # Ranks are threads here, which share torch's own generator.
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    layout = tatami.tiling.Layout(
        replicas=(tatami.tiling.layout.Replica(width=1.0, processors=("p0", "p1"), heights=(0.5, 0.5)),)
    )
    model = tatami.tile(
        network(), comm, batch_size=BATCH, sample=x[:2], layout=layout, speeds="equal", reduction="mean", quiet=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began_s = 0.0
    for number in range(ITERATIONS):
        if number == FIRST:
            began_s, clock.is_on = time.thread_time(), True
        here = model.local(x)
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(here), here))
        optimizer.step()
    return time.thread_time() - began_s


def main() -> None:
    clock = Clock()
    for name, (owner, method) in LOOKS.items():
        setattr(owner, method, clock.within(name, getattr(owner, method)))
    took_s = run_threads(functools.partial(train, clock=clock), size=2)
    each_us = {name: 1e6 * seconds / 2 / (ITERATIONS - FIRST) for name, seconds in clock.seconds.items()}
    total_us = sum(each_us.values())
    print(
        json.dumps(
            {
                "us_per_iteration": {name: round(value, 1) for name, value in each_us.items()},
                "iteration_cpu_ms": round(1e3 * max(took_s) / (ITERATIONS - FIRST), 1),
                "part_of_50_ms": round(total_us / 50_000, 5),
            }
        )
    )


if __name__ == "__main__":
    main()
