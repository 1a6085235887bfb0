"""How fast a rank is at the real work: local compute only, with no communication inside the timed section."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tatami.clock import NO_PACE, Clock, Pace, SystemClock
from tatami.comm.base import AbstractCommunicator
from tatami.workload import Pair, Workload

REPEAT_S = 0.02
"""Enough for a machine of one's own. Where a container's quota lets a rank run for some time and then stops it for the rest
of a period of 10 or 100 ms, that must be many periods, or what is measured is the machine and not the share of it."""
_MAX_SAMPLES = 1024


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What timing a rank gave.

    Attributes:
        flop_per_s: the median over the repeats.
        spread: (fastest - slowest repeat) / median.
    """

    flop_per_s: float
    spread: float


def measure_speed(
    workload: Workload,
    *,
    repeats: int = 5,
    repeat_s: float = REPEAT_S,
    dtype: torch.dtype = torch.float32,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> Speed:
    """Time forward and backward through the pairs of `workload` on this rank.

    Args:
        workload: its pairs are computed whole, for at most 1,024 samples: enough for the rates to settle.
        repeats: how many times; one more, which warms up, is not counted.
        repeat_s: how long each takes at least.
        dtype: of weights and samples.
        clock, pace: see `tatami.clock`.
    """
    clock = clock or SystemClock()
    workload = workload.with_samples(min(workload.samples, _MAX_SAMPLES))
    passes = [_Pass(pair, samples=workload.samples, dtype=dtype) for pair in workload.pairs]
    flop = workload.flop_per_area
    rates = []
    for _ in range(repeats + 1):
        start_s = clock.now_s()
        rounds, spent_s = 0, 0.0
        while spent_s < repeat_s:
            for each in passes:
                pace.begin()
                each.run()
                pace.end()
            rounds += 1
            spent_s = clock.now_s() - start_s
        rates.append(rounds * flop / spent_s)
    counted = rates[1:]
    median = statistics.median(counted)
    return Speed(flop_per_s=median, spread=(max(counted) - min(counted)) / median)


def measure_speeds(
    workload: Workload,
    comm: AbstractCommunicator,
    *,
    repeats: int = 5,
    repeat_s: float = REPEAT_S,
    dtype: torch.dtype = torch.float32,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> list[Speed]:
    """Every rank's speed, timed on all ranks at once, as they will run. Collective."""
    comm.barrier()
    mine = measure_speed(workload, repeats=repeats, repeat_s=repeat_s, dtype=dtype, clock=clock, pace=pace)
    return list(comm.allgather_object(mine))


class _Pass:
    """Forward and backward through one pair."""

    def __init__(self, pair: Pair, *, samples: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator).to(dtype)

        self._x = random(samples, pair.inputs).requires_grad_(pair.input_gradient)
        self._weights = [random(pair.units, pair.inputs), random(pair.outputs, pair.units)]
        for weight in self._weights:
            weight.requires_grad_()

    def run(self) -> None:
        first, second = self._weights
        output = F.linear(torch.sigmoid(F.linear(self._x, first)), second)
        torch.autograd.grad(output.sum(), [*self._weights, *([self._x] if self._x.requires_grad else [])])
