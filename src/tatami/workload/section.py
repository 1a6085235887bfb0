"""What a rank computes before it meets the others of its column in a sum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Section:
    """All alike blocks of a network, and their part of what every rank repeats: flop of one sample.

    What is repeated lies between the blocks. It is shared out among them by their flop, so that heights which balance the whole
    balance each block.

    Attributes:
        units: of each of the blocks.
        unit_flop: for each unit that a rank has.
        beside_flop: of a rank that has any unit.
        repeated_flop: of every rank of a column.
    """

    units: int
    unit_flop: float
    beside_flop: float
    repeated_flop: float

    def flop(self, units: float) -> float:
        """Of a rank with so many units of each block."""
        return self.work(units) + (self.beside_flop if units else 0.0)

    def work(self, units: float) -> float:
        """The same as abilities are estimated by: without what a sample costs in a block beside its units, as in the paper."""
        return self.unit_flop * units + self.repeated_flop
