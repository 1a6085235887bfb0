"""The rows of units that have to travel between two tilings, as data.

Every processor holds all samples (section 5), so only units move: their weights, and the optimizer's state with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tatami.errors import PlanError
from tatami.retiling.takes import unit_takes
from tatami.tiling import Span, Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`source` sends `units` to `dest`; both are names of processors."""

    source: str
    dest: str
    units: Span


def moves(old: Tiling, new: Tiling) -> tuple[Move, ...]:
    """What each processor must receive from whom, so that it holds its units of `new` in full.

    Units that it holds already stay where they are. What it lacks comes from its own replica of `old` where it had one: that
    replica holds every unit once, and a replica re-mapping moves units inside the replicas only.

    Raises:
        PlanError: the tilings have different numbers of units.
    """
    if old.units != new.units:
        raise PlanError(
            f"no moves lead from a tiling of {old.units} units to one of {new.units}; cut both for the same network"
        )
    names = [*dict.fromkeys((*old.by_processor, *new.by_processor))]
    before, after = old.by_processor, new.by_processor
    found, _ = unit_takes(
        [{0: before[name].units} if name in before else {} for name in names],
        [{0: after[name].units} if name in after else {} for name in names],
        unit_sizes={0: 1.0},
        groups=[before[name].replica if name in before else -1 for name in names],
    )
    return tuple(
        Move(source=names[take.source], dest=names[take.dest], units=take.units) for take in found if take.source != take.dest
    )
