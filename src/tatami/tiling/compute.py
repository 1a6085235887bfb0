"""How long a column computes: every sum over it is a meeting, so the slowest rank of each block counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Processor
from tatami.tiling.layout import Column, Layout
from tatami.tiling.span import FEW
from tatami.workload import Workload

_RANGE = 2.7
"""Standard deviations between the largest and the smallest of the seven timings of a probe, which `Processor.spread` is."""


def column_flop_time(column: Column, *, speeds: Mapping[str, float], workload: Workload) -> float:
    """Flop of one sample over the speed, of the slowest of each block, summed over the blocks.

    An imbalance in one block cannot be made up for in another. Six heads over speeds 1, 0.5 and 0.25 are 3, 2 and 1 of them:
    4 units of time where 3.43 would be balanced, however well the hidden units of the next block divide.
    """
    own = [speeds[name] for name in column.processors]
    total = 0.0
    for section in workload.sections:
        shares = column.unit_shares(section.units)
        total += max(section.flop(share * section.units) / speed for share, speed in zip(shares, own, strict=True))
    return total


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
    return low, high


def _deviation(processors: Sequence[Processor]) -> float | None:
    """The mean relative standard deviation of their speeds, of those of which it is known."""
    spreads = [processor.spread for processor in processors if processor.spread is not None]
    return fmean(spreads) / _RANGE if spreads else None


def compute_time(layout: Layout, *, speeds: Mapping[str, float], workload: Workload) -> float:
    """Of the column that takes longest: flop over speed."""
    widths = layout.sample_shares(workload.samples)
    deepest = max(len(column.processors) for column in layout.columns)
    if all(section.units >= FEW * deepest for section in workload.sections):
        return workload.samples * float((np.array(widths) * _fine_flop_times(layout, speeds=speeds, workload=workload)).max())
    widest = max(
        width * column_flop_time(column, speeds=speeds, workload=workload)
        for column, width in zip(layout.columns, widths, strict=True)
    )
    return workload.samples * widest


def _fine_flop_times(layout: Layout, *, speeds: Mapping[str, float], workload: Workload) -> NDArray[np.float64]:
    """`column_flop_time` of every column, where units are so many that all are priced in fractions; to the bit."""
    own = np.array([speeds[name] for name in layout.processors])
    heights = np.array([height for column in layout.columns for height in column.heights])
    starts = np.cumsum([0, *(len(column.processors) for column in layout.columns[:-1])])
    totals = np.zeros(len(starts))
    for section in workload.sections:
        units = heights * section.units
        flop = section.unit_flop * units + section.repeated_flop + np.where(units > 0, section.beside_flop, 0.0)
        totals += np.maximum.reduceat(flop / own, starts)
    return totals
