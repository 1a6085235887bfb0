"""How long a replica computes: every sum over it is a meeting, so the slowest rank of each block counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import expm1
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster, Processor, at_sizes
from tatami.tiling.layout import Layout
from tatami.tiling.span import FEW
from tatami.tiling.speeds import tile_flop
from tatami.workload import Workload

_RANGE = 2.7
"""Standard deviations between the largest and the smallest of the seven timings of a probe, which `Processor.spread` is."""
_MOST_EVENED = 64
"""Most replicas between which single samples are moved: among more the search takes longer than it saves."""
_LEAST_GAIN = 1e-9


def replica_flop_times(layout: Layout, *, speeds: Mapping[str, float], workload: Workload) -> NDArray[np.float64]:
    """For each replica: flop of one sample over the speed, of the slowest in each block, summed over the blocks.

    An imbalance in one block cannot be made up for in another. Six heads over speeds 1, 0.5 and 0.25 are 3, 2 and 1 of them:
    4 units of time where 3.43 would be balanced, however well the hidden units of the next block divide.
    """
    totals = np.zeros(len(layout.replicas))
    for times in section_flop_times(layout, speeds=speeds, workload=workload):
        totals += np.maximum.reduceat(times, layout.starts)
    return totals


def section_flop_times(layout: Layout, *, speeds: Mapping[str, float], workload: Workload) -> Iterator[NDArray[np.float64]]:
    """Flop of one sample over the speed, for each section of the workload and each processor of the layout."""
    own = np.fromiter(map(speeds.__getitem__, layout.processors), dtype=np.float64, count=len(layout.processors))
    for section in workload.sections:
        units = layout.unit_shares(section.units) * section.units
        flop = section.unit_flop * units + section.repeated_flop + np.where(units > 0, section.beside_flop, 0.0)
        yield flop / own


def repeated(layout: Layout, *, workload: Workload) -> NDArray[np.float64]:
    """How often each replica computes its work: more than once where it recomputes activations."""
    return np.array([workload.passes(recomputes=replica.recomputes) for replica in layout.replicas])


def scatter(processors: Sequence[Processor]) -> float:
    """How much longer noisy ranks take that all wait for the slowest, relative to one alone; 0 where nothing is known.

    The expected largest of n normal deviations (Blom's approximation), times the mean standard deviation of the ranks' speeds.
    """
    n = len(processors)
    return (_deviation(processors) or 0.0) * NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def scatter_range(processors: Sequence[Processor]) -> tuple[float, float] | None:
    """As `scatter`, what 5 % and what 95 % of the iterations stay below; None where nothing is known."""
    deviation = _deviation(processors)
    if deviation is None:
        return None
    low, high = (deviation * NormalDist().inv_cdf(share ** (1 / len(processors))) for share in (0.05, 0.95))
    # Below the median as a logarithmic normal distribution, which is the same where they scatter by little: timings that
    # varied by 200 % would otherwise promise iterations that take less than nothing.
    return (expm1(low) if low < 0 else low), high


def _deviation(processors: Sequence[Processor]) -> float | None:
    """The mean relative standard deviation of their speeds, of those of which it is known."""
    spreads = [processor.spread for processor in processors if processor.spread is not None]
    return fmean(spreads) / _RANGE if spreads else None


def calls_s(processor: Processor, *, blocks: int, micro_batches: float = 1) -> float:
    """What the calls of an iteration over so many blocks cost a processor, however small its tiles are: for every micro-batch
    those of the blocks, and once those of the iteration."""
    return processor.step_s + micro_batches * blocks * processor.call_s


def idle_s(layout: Layout, *, cluster: Cluster) -> float:
    """What an iteration takes the slowest of those without a tile: they go through it with all others, which wait for them."""
    if not cluster.calls_known or len(layout.processors) == cluster.size:
        return 0.0
    placed = set(layout.processors)
    return max(each.step_s for each in cluster.processors if each.name not in placed)


def compute_s(layout: Layout, *, cluster: Cluster, workload: Workload, flop_per_s: float) -> float:
    """Seconds that the slowest replica computes: flop over its speed at the size of its micro-batches, and calls.

    Args:
        flop_per_s: of a processor of speed 1.
    """
    samples = workload.samples * np.array(layout.sample_shares(workload.samples))
    return float(_replica_s(layout, samples, cluster=cluster, workload=workload, flop_per_s=flop_per_s).max())


def evened(layout: Layout, *, cluster: Cluster, workload: Workload, flop_per_s: float) -> Layout:
    """The layout after single samples have moved from the slowest replica to the one that then takes least, while that helps.

    Whole samples in proportion to shares (`whole_shares`) do not know that a pass over 3 samples takes less than 3 times as
    long as one over 1 sample. Layouts of many samples or replicas stay as they are.

    Args:
        flop_per_s: of a processor of speed 1.
    """
    total, number = workload.samples, len(layout.replicas)
    if not (1 < number <= _MOST_EVENED and total < FEW * number):
        return layout
    first = np.array(layout.sample_sizes(total))
    if not first.all():
        return layout

    def times_s(samples: NDArray[np.int_]) -> NDArray[np.float64]:
        return _replica_s(layout, samples, cluster=cluster, workload=workload, flop_per_s=flop_per_s)

    sizes, now_s = first.copy(), times_s(first)
    for _ in range(total):
        giver = int(now_s.argmax())
        more_s = times_s(sizes + 1)
        more_s[giver] = np.inf
        taker = int(more_s.argmin())
        if sizes[giver] == 1 or more_s[taker] >= now_s[giver] * (1 - _LEAST_GAIN):
            break
        sizes[giver] -= 1
        sizes[taker] += 1
        now_s = times_s(sizes)
    if (sizes == first).all():
        return layout
    return Layout(
        replicas=tuple(each.as_wide_as(size / total) for each, size in zip(layout.replicas, sizes.tolist(), strict=True))
    )


def _replica_s(
    layout: Layout, samples: NDArray[np.floating | np.integer], *, cluster: Cluster, workload: Workload, flop_per_s: float
) -> NDArray[np.float64]:
    """Seconds that each replica computes if it has so many of the samples."""
    speeds: Mapping[str, float] = cluster.speeds
    if cluster.sized:
        speeds = at_sizes(speeds, tile_flop(layout, workload=workload, samples=samples.tolist()))
    again = repeated(layout, workload=workload)
    times_s = samples * replica_flop_times(layout, speeds=speeds, workload=workload) / flop_per_s * again
    if cluster.calls_known:
        blocks, by_name = len(workload.blocks), cluster.by_name
        passes = again * [replica.micro_batches for replica in layout.replicas]
        times_s += [
            max(calls_s(by_name[name], blocks=blocks, micro_batches=number) for name in replica.processors)
            for replica, number in zip(layout.replicas, passes.tolist(), strict=True)
        ]
    return times_s
