"""A column re-mapping, and what a layout is going to cost in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tatami.tiling import Column, Layout, Tiling


def recut(layout: Layout, *, speeds: Mapping[str, float], units: int) -> Layout:
    """Same columns, members, order and widths; only the cuts inside each column move (section 5).

    Args:
        layout: the layout in force.
        speeds: of every processor in it, > 0.
        units: nobody gets less than one of these.
    """
    return Layout(
        columns=tuple(
            Column(
                width=column.width,
                processors=column.processors,
                heights=_heights([speeds[name] for name in column.processors], least=1 / units),
            )
            for column in layout.columns
        )
    )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Compute times of a tiling at the estimated speeds.

    Attributes:
        ratio: the shortest over the longest.
        slowest_s: the longest (in seconds where speeds are in samples x units per second; only ratios are used).
    """

    ratio: float
    slowest_s: float


def forecast(tiling: Tiling, *, speeds: Mapping[str, float]) -> Forecast:
    """Area over speed of every tile that is not empty."""
    times = [tile.area / speeds[tile.processor] for tile in tiling.tiles if tile.area]
    return Forecast(ratio=min(times) / max(times), slowest_s=max(times))


def _heights(speeds: Sequence[float], *, least: float) -> tuple[float, ...]:
    """Shares in proportion to `speeds`, none below `least`: who would be gets it, and the others share the rest."""
    raised: set[int] = set()
    while True:
        total = sum(speed for index, speed in enumerate(speeds) if index not in raised)
        rest = 1.0 - least * len(raised)
        shares = [least if index in raised else rest * speed / total for index, speed in enumerate(speeds)]
        low = {index for index, share in enumerate(shares) if share < least}
        if not low or len(raised | low) == len(speeds):
            return tuple(shares)
        raised |= low
