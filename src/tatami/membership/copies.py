"""Who holds which units, counting copies, and from whom each rank takes what it lacks.

Columns hold every unit once each, so with two columns every unit has two holders at no cost. In a layout of one column each
rank keeps a mirror: a copy of its neighbour's units, which applies the same updates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tatami.tiling import Layout, Span, Tiling
from tatami.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """`keeper` holds a copy of the units of `owner`."""

    owner: str
    keeper: str


@dataclass(frozen=True, kw_only=True)
class Held:
    """What is held where.

    Attributes:
        layout: who owns which units.
        mirrors: who keeps a copy of whose units.
    """

    layout: Layout
    mirrors: tuple[Mirror, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """`dest` fills `units` of a block from `source`, which may be itself.

    Attributes:
        from_mirror: the source has them in its mirror, not in its own tile.
        to_mirror: the destination puts them into its mirror.
    """

    dest: str
    source: str
    block: int
    units: Span
    from_mirror: bool = False
    to_mirror: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Units of a block that are held by no rank that lives, and the ranks that held them."""

    block: int
    units: Span
    held_by: tuple[str, ...]


def mirrors_of(layout: Layout, *, copies: int) -> tuple[Mirror, ...]:
    """Who has to keep a mirror so that every unit has `copies` (1 or 2) holders: in one column, each rank of its neighbour."""
    if copies < 2 or len(layout.columns) > 1:
        return ()
    names = layout.columns[0].processors
    if len(names) < 2:
        return ()
    return tuple(Mirror(owner=owner, keeper=names[(index + 1) % len(names)]) for index, owner in enumerate(names))


def takes(
    before: Held, after: Held, *, workload: Workload, sources: Collection[str]
) -> tuple[tuple[Take, ...], tuple[Lost, ...]]:
    """From whom every rank of `after` takes its units, and which units cannot be had.

    What a rank holds already it takes from itself. The rest it takes from the column that has been asked for least by then, or
    from the mirrors, so that the work of sending is shared.

    Args:
        before: who held what.
        after: who is to hold what.
        workload: the blocks.
        sources: the ranks of `before` that can still be asked.
    """
    found: list[Take] = []
    lost: list[Lost] = []
    alive = frozenset(sources)
    asked: Counter[int] = Counter()
    tilings = zip(before.layout.cut_blocks(workload), after.layout.cut_blocks(workload), strict=True)
    for block, (old, new) in enumerate(tilings):
        layers = [_Layer(pieces) for pieces in _layers(old, before.mirrors, alive)]
        own: dict[str, list[_Piece]] = {}
        for piece in (piece for layer in layers for piece in layer.pieces):
            own.setdefault(piece.holder, []).append(piece)
        # The layer of which each holder has been asked for least comes first; what is asked for next counts at once.
        queue = [(asked[index] / max(len(layer.pieces), 1), index) for index, layer in enumerate(layers)]
        heapify(queue)
        for dest, wanted, to_mirror in (piece for pieces in _layers(new, after.mirrors, None) for piece in pieces):
            missing = [wanted]
            for piece in sorted(own.get(dest, ()), key=lambda piece: piece.is_mirror):
                missing = _taken(found, missing, piece, block=block, dest=dest, to_mirror=to_mirror)
            used = []
            while missing and queue:
                index = heappop(queue)[1]
                before_size = sum(span.size for span in missing)
                for piece in [piece for span in missing for piece in layers[index].over(span)]:
                    missing = _taken(found, missing, piece, block=block, dest=dest, to_mirror=to_mirror)
                asked[index] += before_size - sum(span.size for span in missing)
                used.append(index)
            for index in used:
                heappush(queue, (asked[index] / max(len(layers[index].pieces), 1), index))
            if missing:
                everyone = [piece for pieces in _layers(old, before.mirrors, None) for piece in pieces]
                lost += [
                    Lost(
                        block=block,
                        units=span,
                        held_by=tuple(sorted({piece.holder for piece in everyone if (piece.units & span).size})),
                    )
                    for span in missing
                ]
    return tuple(found), _merged(lost)


class _Piece(NamedTuple):
    """Units that a rank holds, in its mirror or in its own tile."""

    holder: str
    units: Span
    is_mirror: bool


class _Layer:
    """Pieces of which no two have a unit in common."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.units.start)
        self._starts = [piece.units.start for piece in self.pieces]

    def over(self, span: Span) -> list[_Piece]:
        """Those that may have units of `span`."""
        first = max(bisect_right(self._starts, span.start) - 1, 0)
        return self.pieces[first : bisect_left(self._starts, span.stop)]


def _layers(tiling: Tiling, mirrors: Sequence[Mirror], alive: Collection[str] | None) -> list[list[_Piece]]:
    """The columns, and the mirrors: what those hold that are alive, or all; nothing that is empty."""
    columns = [[_Piece(tile.processor, tile.units, False) for tile in column] for column in tiling.columns]
    kept = [_Piece(mirror.keeper, tiling.by_processor[mirror.owner].units, True) for mirror in mirrors]
    return [
        [piece for piece in layer if piece.units.size and (alive is None or piece.holder in alive)]
        for layer in [*columns, kept]
    ]


def _taken(found: list[Take], missing: Sequence[Span], piece: _Piece, *, block: int, dest: str, to_mirror: bool) -> list[Span]:
    """Take of what is missing what this piece has; returns what is missing still."""
    left: list[Span] = []
    for span in missing:
        common = span & piece.units
        if not common.size:
            left.append(span)
            continue
        left += [rest for rest in (Span(span.start, common.start), Span(common.stop, span.stop)) if rest.size]
        found.append(
            Take(dest=dest, source=piece.holder, block=block, units=common, from_mirror=piece.is_mirror, to_mirror=to_mirror)
        )
    return left


def _merged(lost: Sequence[Lost]) -> tuple[Lost, ...]:
    """Each stretch once, though several ranks may lack it."""

    def joined() -> Iterator[Lost]:
        last: Lost | None = None
        for each in sorted(set(lost), key=lambda each: (each.block, each.units)):
            if last is not None and last.block == each.block and each.units.start <= last.units.stop:
                span = Span(last.units.start, max(last.units.stop, each.units.stop))
                last = Lost(block=last.block, units=span, held_by=tuple(sorted({*last.held_by, *each.held_by})))
                continue
            if last is not None:
                yield last
            last = each
        if last is not None:
            yield last

    return tuple(joined())
