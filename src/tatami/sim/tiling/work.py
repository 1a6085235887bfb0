"""How much a tile computes in an iteration, by phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tatami.errors import InputError
from tatami.tiling import Tile
from tatami.workload import Workload

_FORWARD_SHARE = 1 / 3
"""Forward's share of the cost of layers outside of blocks: backward is two products of the same size for each of forward."""


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
    """Flop of one processor: compute 1, compute 2 and compute 3; together what `Workload.flop` says of its tile.

    Attributes:
        forward: of each block, in the order of the forward pass: what lies before the block's sum over the replica. One where
            there is no block.
        backward: the same backward, in the order of the forward pass.
        update_flop: of all.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update_flop: float

    @property
    def forward_flop(self) -> float:
        return math.fsum(self.forward)

    @property
    def backward_flop(self) -> float:
        return math.fsum(self.backward)

    def repeated(self, passes: float) -> Work:
        """The same where so much is computed in all, `passes` times this, because activations are recomputed in the backward
        pass."""
        more = (passes - 1) * self.total_flop / (self.forward_flop or 1.0)
        pairs = zip(self.forward, self.backward, strict=True)
        return replace(self, backward=tuple(backward + more * forward for forward, backward in pairs))

    def part(self, share: float) -> Work:
        """The work of a micro-batch with this share of the samples; the update is not shared out."""
        return replace(
            self, forward=tuple(share * flop for flop in self.forward), backward=tuple(share * flop for flop in self.backward)
        )

    @property
    def total_flop(self) -> float:
        return self.forward_flop + self.backward_flop + self.update_flop


def work_of(tiles: Sequence[Tile], *, samples: int, workload: Workload, startup: Startup = NO_STARTUP) -> Work:
    """The work of one processor.

    What every rank repeats is shared out among the blocks by their flop, as planners have it. The update, two operations for
    each weight it holds, is taken out of backward, which counts it in (as Table 1 does).

    Args:
        tiles: its tile for each block of the workload.
        samples: of its replica.
        workload: what is laid out.
        startup: of each of its tiles.
    """
    repeated = (workload.replicated_flop_per_sample + workload.sample_flop) * samples
    if not tiles:
        flop = repeated + startup.tile_flop + startup.sample_flop * samples
        return Work(forward=(flop * _FORWARD_SHARE,), backward=(flop * (1 - _FORWARD_SHARE),), update_flop=0.0)
    whole = sum(block.flop_per_unit * block.units for block in workload.blocks)
    forward, backward, update = [], [], 0.0
    for block, tile in zip(workload.blocks, tiles, strict=True):
        units = tile.units.size
        beside = startup.tile_flop + startup.sample_flop * samples if units else 0.0
        beside += repeated * (block.flop_per_unit * block.units / whole if whole else 1 / len(tiles))
        flop = block.flop(units=units, samples=samples)
        own_update = 2.0 * block.unit_parameters * units if samples else 0.0
        forward.append(flop * block.forward_fraction + beside * _FORWARD_SHARE)
        backward.append(flop * (1 - block.forward_fraction) + beside * (1 - _FORWARD_SHARE) - own_update)
        update += own_update
    return Work(forward=tuple(forward), backward=tuple(backward), update_flop=update)
