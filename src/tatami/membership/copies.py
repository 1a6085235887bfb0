"""Who holds which units, counting copies, and from whom each rank takes what it lacks.

Columns hold every unit once each, so with two columns every unit has two holders at no cost. In a layout of one column each
rank keeps a mirror: a copy of its neighbour's units, which applies the same updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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

    What a rank holds already it takes from itself. The rest it takes from the one of the holders that has been asked for
    least, so that the work of sending is shared.

    Args:
        before: who held what.
        after: who is to hold what.
        workload: the blocks.
        sources: the ranks of `before` that can still be asked.
    """
    found: list[Take] = []
    lost: list[Lost] = []
    asked: Counter[str] = Counter()
    tilings = zip(before.layout.cut_blocks(workload), after.layout.cut_blocks(workload), strict=True)
    for block, (old, new) in enumerate(tilings):
        everyone = _pieces(old, before.mirrors)
        holders = [piece for piece in everyone if piece[0] in sources]
        for dest, wanted, to_mirror in _pieces(new, after.mirrors):
            missing = [wanted]
            nearest_first = sorted(holders, key=lambda piece: (piece[0] != dest, asked[piece[0]], piece[2]))
            for source, held, from_mirror in nearest_first:
                left: list[Span] = []
                for span in missing:
                    common = span & held
                    if not common.size:
                        left.append(span)
                        continue
                    left += [rest for rest in (Span(span.start, common.start), Span(common.stop, span.stop)) if rest.size]
                    names = {"block": block, "units": common, "from_mirror": from_mirror, "to_mirror": to_mirror}
                    found.append(Take(dest=dest, source=source, **names))  # type: ignore[arg-type]
                    asked[source] += common.size if source != dest else 0
                missing = left
            lost += [
                Lost(block=block, units=span, held_by=tuple(sorted({name for name, held, _ in everyone if (held & span).size})))
                for span in missing
            ]
    return tuple(found), _merged(lost)


def _pieces(tiling: Tiling, mirrors: Sequence[Mirror]) -> list[tuple[str, Span, bool]]:
    """Holder, units, whether in its mirror; nothing that is empty."""
    owned = [(tile.processor, tile.units, False) for tile in tiling.tiles]
    kept = [(mirror.keeper, tiling.by_processor[mirror.owner].units, True) for mirror in mirrors]
    return [piece for piece in owned + kept if piece[1].size]


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
