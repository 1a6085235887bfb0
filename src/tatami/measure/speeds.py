"""How fast a rank is at the real work: local compute only, with no communication inside the timed section."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tatami.clock import NO_PACE, Clock, Pace, SystemClock
from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.runtime.stopwatch import stopwatch_of
from tatami.tiling import GRAIN
from tatami.workload import Block, Workload

REPEATS = 5
REPEAT_S = 0.02
"""Enough for a machine that nothing else uses. Where a container's quota lets a rank run for some time and then stops it for
the rest of a period of 10 or 100 ms, that must be many periods, or what is measured is the machine and not the share of it."""
NOISY = 0.1
LONG_REPEAT_S = 0.2
"""Where repeats of some rank differ by more, all are measured again like this: a speed that is 15 % off costs as much."""
_MAX_SAMPLES = 1024
_FEW = 8
"""A tile of few units has this part of all."""
_LEAST_DIFFERENCE = 0.1
"""Smallest part of all units' time by which few units must be faster: in a network so small that its units drown in what calls
take, noise would say that units take no time, and samples any. The part is 0.69 in 203-80-26 with 1,024 samples, 0.36 in
12-8-3, and 0.04 to 0.07 in 20-16-5 with 64, whose tiles of an eighth are so predicted 5 % too short."""
_WARM_UP_S = 0.3
"""So long a device works before it is timed: its libraries choose their kernels, and its clock rises."""
_CPU = torch.device("cpu")


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
    repeats: int = REPEATS,
    repeat_s: float = REPEAT_S,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> Speed:
    """Time forward and backward through the blocks of `workload` on this rank.

    Args:
        workload: its blocks are computed whole, for at most 1,024 samples: enough for the rates to settle.
        repeats: how many times; one more, which warms up, is not counted.
        repeat_s: how long each takes at least.
        dtype: of weights and samples.
        device: where they lie.
        clock, pace: see `tatami.clock`.
    """
    workload = workload.with_samples(min(workload.samples, _MAX_SAMPLES))
    timer = Timer(device=device, repeat_s=repeat_s, clock=clock or SystemClock(), pace=pace)
    passes = [BlockPass(block, samples=workload.samples, dtype=dtype, device=device) for block in workload.blocks]
    return timer.speed(passes, flop=workload.flop_per_area + workload.samples * workload.sample_flop, repeats=repeats)


def measure_speeds(
    workload: Workload,
    comm: AbstractCommunicator,
    *,
    repeats: int = REPEATS,
    repeat_s: float = REPEAT_S,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> list[Speed]:
    """Every rank's speed, timed on all ranks at once, as they will run; longer where the first repeats differ. Collective."""

    def measured(seconds: float) -> Speed:
        return measure_speed(workload, repeats=repeats, repeat_s=seconds, dtype=dtype, device=device, clock=clock, pace=pace)

    # What all ranks measure at once, by repeats of `repeat_s`, or of `LONG_REPEAT_S` where those of some rank differ.
    comm.barrier()
    speeds = list(comm.allgather_object(measured(repeat_s)))
    if repeat_s >= LONG_REPEAT_S or max(speed.spread for speed in speeds) <= NOISY:
        return speeds
    return list(comm.allgather_object(measured(LONG_REPEAT_S)))


def at_hosts(cluster: Cluster, comm: AbstractCommunicator) -> Cluster:
    """Processors where the ranks are: what goes between hosts takes the network, and no one's memory."""
    if len(set(comm.hosts)) == 1:
        return cluster
    pairs = zip(cluster.processors, comm.hosts, strict=True)
    return replace(cluster, processors=tuple(replace(each, host=host) for each, host in pairs))


def measure_sample_flop(
    workload: Workload,
    comm: AbstractCommunicator,
    *,
    repeats: int = REPEATS,
    repeat_s: float = REPEAT_S,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> float:
    """`Workload.sample_flop` of these machines, from tiles with all units and with an eighth of them. Collective.

    A rank that computes at `a` flop/s takes (F + G) / a for a tile of F flop; two tiles tell `a` and G. G is that of the
    library and the network rather than the machine's, so the median of the ranks counts. Calls are in it as well, and stand for
    what an iteration spends on each sample outside of blocks: without them, tilings of few units were planned 10 % too short.
    """
    timer = Timer(device=_CPU, repeat_s=repeat_s, clock=clock or SystemClock(), pace=pace)
    workload = workload.with_samples(min(workload.samples, _MAX_SAMPLES))
    blocks = {share: [replace(block, units=_part_of(block.units, share)) for block in workload.blocks] for share in (1, _FEW)}
    tiles = {share: replace(workload, blocks=tuple(each), sample_flop=0.0) for share, each in blocks.items()}
    passes = {
        share: [BlockPass(block, samples=tile.samples, dtype=torch.float32, device=_CPU) for block in tile.blocks]
        for share, tile in tiles.items()
    }
    most_flop, least_flop = (replace(tiles[n], replicated_flop_per_sample=0).flop(width=1.0, height=1.0) for n in (1, _FEW))
    comm.barrier()
    found = []
    for _ in range(repeats + 1):
        most_s, least_s = (timer.seconds(passes[share]) for share in (1, _FEW))
        units_s = max(most_s - least_s, _LEAST_DIFFERENCE * most_s)
        found.append(max(0.0, (most_flop - least_flop) / units_s * (most_s - units_s) - least_flop))
    everywhere = comm.allgather_object(statistics.median(found[1:]))
    return float(statistics.median(everywhere)) / workload.samples


def _part_of(units: int, share: int) -> int:
    """As tiles are cut."""
    part = max(1, units // share)
    return part if part < GRAIN else part // GRAIN * GRAIN


@dataclass(frozen=True, kw_only=True)
class Timer:
    """Times passes on one device."""

    device: torch.device
    repeat_s: float
    clock: Clock
    pace: Pace

    def speed(self, passes: Sequence[AbstractPass], *, flop: float, repeats: int) -> Speed:
        """The speed of passes of `flop` in all, from `repeats` timings after one that warms up."""
        self.warm_up(passes)
        counted = [flop / self.seconds(passes) for _ in range(repeats + 1)][1:]
        median = statistics.median(counted)
        return Speed(flop_per_s=median, spread=(max(counted) - min(counted)) / median)

    def warm_up(self, passes: Sequence[AbstractPass]) -> None:
        """What a device needs before it is timed."""
        if self.device.type != "cpu":
            self.longer(_WARM_UP_S).seconds(passes)

    def longer(self, repeat_s: float) -> Timer:
        """The same with timings of at least so long."""
        return replace(self, repeat_s=repeat_s)

    def seconds(self, passes: Sequence[AbstractPass]) -> float:
        """Seconds of all `passes`, repeated for at least `repeat_s`."""
        stopwatch = stopwatch_of(self.device, self.clock)
        start_s = self.clock.now_s()
        rounds, spent_s = 0, 0.0
        while spent_s < self.repeat_s:
            for each in passes:
                self.pace.begin()
                each.run()
                stopwatch.finish()
                self.pace.end()
            rounds += 1
            spent_s = self.clock.now_s() - start_s
        return spent_s / rounds


class AbstractPass(ABC):
    """Something that is computed once, and can be timed."""

    @abstractmethod
    def run(self) -> None:
        """Compute it."""


class BlockPass(AbstractPass):
    """Forward and backward through one block, computed as two linear layers of its sizes; a bias counts as one more input."""

    def __init__(self, block: Block, *, samples: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

        frozen = round(block.unit_frozen_bytes / dtype.itemsize)
        inputs = max(1, block.unit_parameters + frozen - block.forward_elements)
        self._x = random(samples, inputs).requires_grad_(block.backward_elements > 0)
        self._weights = [random(block.units, inputs), random(block.forward_elements, block.units)]
        for weight in self._weights:
            weight.requires_grad_()

    def run(self) -> None:
        first, second = self._weights
        output = F.linear(torch.sigmoid(F.linear(self._x, first)), second)
        torch.autograd.grad(output.sum(), [*self._weights, *([self._x] if self._x.requires_grad else [])])
