"""How much a tile computes in an iteration, by phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tatami.errors import InputError
from tatami.tiling import Tile
from tatami.workload import Workload

_FORWARD_SHARE = 1 / 3
"""Of what layers outside of blocks cost: backward is two products of the same size for each of forward."""


@dataclass(frozen=True, kw_only=True)
class Startup:
    """What a tile costs beyond Table 1, in flop at the rate of Table 1's: t(w, h) = t0 + b w + a w h.

    Attributes:
        tile_flop: of an iteration, however small the tile is: the calls.
        sample_flop: of each sample, however few units it meets: the inputs are read, and the outputs compared, for all of them.

    Raises:
        InputError: one that is negative.
    """

    tile_flop: float = 0.0
    sample_flop: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tile_flop", "sample_flop"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} of a startup must be a finite number >= 0, not {getattr(self, name)}")


NO_STARTUP = Startup()


@dataclass(frozen=True, kw_only=True)
class Work:
    """Flop of one processor: compute 1, compute 2 and compute 3; together `Workload.flop` of its tile."""

    forward_flop: float
    backward_flop: float
    update_flop: float

    @property
    def total_flop(self) -> float:
        return self.forward_flop + self.backward_flop + self.update_flop


def work_of(tiles: Sequence[Tile], *, workload: Workload, startup: Startup = NO_STARTUP) -> Work:
    """The work of one processor.

    The update, two operations for each weight it holds, is taken out of backward, which counts it in (as Table 1 does).

    Args:
        tiles: its tile for each block of the workload.
        workload: what is laid out.
        startup: of each of its tiles.
    """
    samples = tiles[0].samples.size
    beside = len(tiles) * (startup.tile_flop + startup.sample_flop * samples)
    beside += workload.replicated_flop_per_sample * samples
    forward = beside * _FORWARD_SHARE
    backward = beside - forward
    update = 0.0
    for block, tile in zip(workload.blocks, tiles, strict=True):
        units = tile.units.size
        flop = block.flop(units=units, samples=samples)
        forward += flop * block.forward_fraction
        backward += flop * (1 - block.forward_fraction)
        update += 2.0 * block.unit_parameters * units if samples else 0.0
    return Work(forward_flop=forward, backward_flop=backward - update, update_flop=update)
