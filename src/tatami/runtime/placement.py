"""Where the ranks of a tiled model lie: the layout, cut for each block, and what the ranks then talk through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.errors import PlanError
from tatami.runtime.gradient_exchange import GradientExchange
from tatami.runtime.rows import TiledBlock
from tatami.tiling import Layout, Span, Tiling
from tatami.tiling.summing import slowest_byte_s, transfer_rates
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All that a re-tiling changes, beside the rows of the weights.

    Attributes:
        layout: in fractions.
        tilings: the layout, cut for each block; one in all where there is no block.
        replica: the ranks of this rank's replica; None where it is alone in it, or has no tile.
        exchange: sums over the replicas; None where all ranks are in one replica.
    """

    layout: Layout
    tilings: tuple[Tiling, ...]
    replica: AbstractCommunicator | None
    exchange: GradientExchange | None


def place(
    layout: Layout, comm: AbstractCommunicator, *, cluster: Cluster, workload: Workload, blocks: Sequence[TiledBlock]
) -> Placement:
    """What `layout` means for this rank of `comm`. Collective.

    Args:
        layout: to lie like.
        comm: all ranks.
        cluster: the processor of every rank, the same on all.
        workload: the blocks that are cut.
        blocks: the same, as the network has them.

    Raises:
        PlanError: the layout names processors that no rank runs on.
    """
    names = [processor.name for processor in cluster.processors]
    unknown = [name for name in layout.processors if name not in names]
    if unknown:
        raise PlanError(f"the layout names processors that no rank runs on: {unknown}; the ranks run on {names}")
    # A network without blocks is a floor of one unit, which owns nothing: replicas of samples are left.
    cut = iter(layout.cut_blocks(workload))
    wholes: list[Tiling] = []
    tilings: list[Tiling] = []
    for block in blocks:
        wholes += [next(cut)] if block.begins else []
        tilings.append(wholes[-1] if block.only is None else _one_unit(wholes[-1], block.only))
    tilings = tilings or [layout.cut(samples=workload.samples, units=1)]
    tiling, me = largest(tilings), names[comm.rank]
    tile = tiling.by_processor.get(me)
    together = [] if tile is None else [names.index(other.processor) for other in tiling.replicas[tile.replica]]
    replica = comm.subgroup(together) if comm.size > 1 else None
    everyone = len(tiling.replicas) == 1 and len(layout.processors) == comm.size
    return Placement(
        layout=layout,
        tilings=tuple(tilings),
        replica=replica if replica is not None and replica.size > 1 else None,
        exchange=None
        if everyone
        else GradientExchange(
            comm,
            tilings=tilings,
            names=names,
            wire=workload.wire,
            rates=transfer_rates(cluster),
            byte_s=slowest_byte_s(cluster, names),
        ),
    )


def _one_unit(tiling: Tiling, unit: int) -> Tiling:
    """The same replicas, over one of the units."""
    tiles = (replace(tile, units=Span(int(tile.units.start > unit), int(tile.units.stop > unit))) for tile in tiling.tiles)
    return Tiling(samples=tiling.samples, units=1, tiles=tuple(tiles))


def largest(tilings: Sequence[Tiling]) -> Tiling:
    """The tiling of the block that has most units."""
    return max(tilings, key=lambda tiling: tiling.units)
