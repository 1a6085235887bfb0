"""One tile: the rectangle of samples and units that one processor computes."""

from __future__ import annotations

from dataclasses import dataclass

from tatami.tiling.span import Span


@dataclass(frozen=True, kw_only=True)
class Tile:
    """`samples` x `units` of one processor, in replica `replica` (counted from the left, from 0)."""

    processor: str
    replica: int
    samples: Span
    units: Span

    @property
    def area(self) -> int:
        """Samples times units: the work, up to a factor."""
        return self.samples.size * self.units.size
