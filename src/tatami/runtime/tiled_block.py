"""A block of a network: what planners know of it, and where its units lie in the network's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tatami.runtime.rows import UnitRuns
from tatami.workload import Block


@dataclass(frozen=True, kw_only=True)
class TiledBlock:
    """A block of a network, or one unit of it whose tensors are its own.

    Attributes:
        facts: what planners know of it.
        cuts: by the names of the network's tensors: where its units lie in them.
        only: the unit that it is, where each has tensors of its own (an expert): then there is one of these for each unit, in
            their order, with the same facts, and `cuts` are those of a single unit. None where it is all units.
    """

    facts: Block
    cuts: Mapping[str, UnitRuns]
    only: int | None = None

    @property
    def begins(self) -> bool:
        """Whether it stands for its facts: all units, or the first of them."""
        return not self.only
