"""The rows of units that have to travel between two tilings, as data.

Every processor holds all samples (section 5), so only units move: their weights, and the optimizer's state with them.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tatami.errors import PlanError
from tatami.tiling import Span, Tile, Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`source` sends `units` to `dest`; both are names of processors."""

    source: str
    dest: str
    units: Span


def moves(old: Tiling, new: Tiling) -> tuple[Move, ...]:
    """What each processor must receive from whom, so that it holds its units of `new` in full.

    Units that it holds already stay where they are. A source is looked for in the processor's own column of `old` first: that
    column holds every unit once, and a column re-mapping moves units inside the columns only. A processor that had no tile
    takes its units from all columns in turn, from the rank that has sent least, so that no rank sends everything.

    Raises:
        PlanError: the tilings have different numbers of units.
    """
    if old.units != new.units:
        raise PlanError(
            f"no moves lead from a tiling of {old.units} units to one of {new.units}; cut both for the same network"
        )
    holders = [[tile for tile in column if tile.units.size] for column in old.columns]
    sent: Counter[str] = Counter()
    newcomers: list[Tile] = []
    result: dict[str, list[Move]] = {tile.processor: [] for tile in new.tiles}
    for tile in new.tiles:
        held = old.by_processor.get(tile.processor)
        if held is None:
            newcomers.append(tile)
            continue
        for missing in _without(tile.units, held.units):
            result[tile.processor] += _from_column(missing, holders[held.column], dest=tile.processor)
    for move in (move for own in result.values() for move in own):
        sent[move.source] += move.units.size
    for tile in newcomers:
        result[tile.processor] += _from_all(tile, old, sent)
    return tuple(move for own in result.values() for move in _merged(own))


def _without(wanted: Span, held: Span) -> Iterator[Span]:
    """The parts of `wanted` above and below `held`."""
    if not (wanted & held).size:
        held = Span(wanted.start, wanted.start)
    for part in (Span(wanted.start, max(wanted.start, held.start)), Span(min(wanted.stop, held.stop), wanted.stop)):
        if part.size:
            yield part


def _from_column(missing: Span, column: list[Tile], *, dest: str) -> Iterator[Move]:
    first = bisect.bisect_right([tile.units.start for tile in column], missing.start) - 1
    for tile in column[first:]:
        if tile.units.start >= missing.stop:
            break
        yield Move(source=tile.processor, dest=dest, units=tile.units & missing)


def _from_all(tile: Tile, old: Tiling, sent: Counter[str]) -> Iterator[Move]:
    """Pieces of at most 1/C of the tile, each from the one of its C owners that has sent least so far."""
    groups = old.groups
    piece = max(1, -(-tile.units.size // len(old.columns)))
    position = tile.units.start
    index = bisect.bisect_right([group.units.start for group in groups], position) - 1
    while position < tile.units.stop:
        group = groups[index]
        stop = min(position + piece, group.units.stop, tile.units.stop)
        source = min(group.owners, key=lambda name: sent[name])
        sent[source] += stop - position
        yield Move(source=source, dest=tile.processor, units=Span(position, stop))
        position = stop
        if position == group.units.stop:
            index += 1


def _merged(given: list[Move]) -> Iterator[Move]:
    """Adjacent spans on the same way become one message."""
    last: Move | None = None
    for move in given:
        if last and last.source == move.source and last.units.stop == move.units.start:
            last = Move(source=last.source, dest=last.dest, units=Span(last.units.start, move.units.stop))
            continue
        if last:
            yield last
        last = move
    if last:
        yield last
