"""How long a column computes: every sum over it is a meeting, so the slowest rank of each block counts."""

from __future__ import annotations

from collections.abc import Mapping

from tatami.tiling.layout import Column, Layout
from tatami.workload import Workload


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


def compute_time(layout: Layout, *, speeds: Mapping[str, float], workload: Workload) -> float:
    """Of the column that takes longest: flop over speed."""
    widest = max(
        width * column_flop_time(column, speeds=speeds, workload=workload)
        for column, width in zip(layout.columns, layout.sample_shares(workload.samples), strict=True)
    )
    return workload.samples * widest
