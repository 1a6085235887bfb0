"""Who holds which units, counting copies, and from whom each rank takes what it lacks.

Replicas hold every unit once each, so with two replicas every unit has two holders at no cost. In a layout of one replica, or
one replica of pipeline stages, each rank keeps a mirror: a copy of its neighbour's units, which applies the same updates.

What is not divided into units has a number, too, where there are pipeline stages: the pieces of the network come after the
blocks, as blocks of one unit that every rank of their stage holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tatami.retiling.takes import unit_takes
from tatami.tiling import Layout, Span, StagedLayout
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

    layout: Layout | StagedLayout
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


def mirrors_of(layout: Layout | StagedLayout, *, copies: int) -> tuple[Mirror, ...]:
    """Who has to keep a mirror so that every unit has `copies` (1 or 2) holders: of one replica, each for its neighbour."""
    replicas = layout.num_replicas if isinstance(layout, StagedLayout) else len(layout.replicas)
    names = tuple(layout.processors)
    if copies < 2 or replicas > 1 or len(names) < 2:
        return ()
    return tuple(Mirror(owner=owner, keeper=names[(index + 1) % len(names)]) for index, owner in enumerate(names))


def takes(
    before: Held, after: Held, *, workload: Workload, sources: Collection[str]
) -> tuple[tuple[Take, ...], tuple[Lost, ...]]:
    """From whom every rank of `after` takes its units, and which units cannot be had; see `unit_takes`.

    Args:
        before: who held what.
        after: who is to hold what.
        workload: the blocks, and the pieces where there may be pipeline stages.
        sources: the ranks of `before` that can still be asked.
    """
    old, new = _units_of(before, workload), _units_of(after, workload)
    holders = [*dict.fromkeys((*old, *new))]  # (name, whether it is its mirror)
    number_of: dict[str, int] = {}
    found, missing = unit_takes(
        [old.get(each, {}) if each[0] in sources else {} for each in holders],
        [new.get(each, {}) for each in holders],
        unit_sizes=_unit_bytes(workload),
        ranks=[number_of.setdefault(name, len(number_of)) for name, _ in holders],
    )
    lost = [
        Lost(
            block=each.name,
            units=each.units,
            held_by=tuple(sorted({name for (name, _), own in old.items() if (own.get(each.name, _NOTHING) & each.units).size})),
        )
        for each in missing
    ]
    return tuple(
        Take(
            dest=holders[each.dest][0],
            source=holders[each.source][0],
            block=each.name,
            units=each.units,
            from_mirror=holders[each.source][1],
            to_mirror=holders[each.dest][1],
        )
        for each in found
    ), _merged(lost)


_NOTHING = Span(0, 0)


def _units_of(held: Held, workload: Workload) -> Mapping[tuple[str, bool], dict[int, Span]]:
    """By rank, and whether it is its mirror: its units of each block, and the pieces that it has."""
    layout = held.layout
    units = _of_stages(layout, workload) if isinstance(layout, StagedLayout) else _of_replicas(layout, workload)
    found = {(name, False): own for name, own in units.items()}
    return found | {(mirror.keeper, True): units[mirror.owner] for mirror in held.mirrors}


def _of_replicas(layout: Layout, workload: Workload) -> dict[str, dict[int, Span]]:
    pieces = {len(workload.blocks) + number: Span(0, 1) for number in range(len(workload.pieces))}
    units = {name: dict(pieces) for name in layout.processors}
    for number, tiling in enumerate(layout.cut_blocks(workload)):
        for tile in tiling.tiles:
            units[tile.processor][number] = tile.units
    return units


def _of_stages(layout: StagedLayout, workload: Workload) -> dict[str, dict[int, Span]]:
    lie = _pieces_of_blocks(workload)
    units: dict[str, dict[int, Span]] = {name: {} for name in layout.processors}
    ends = (*layout.cuts, len(workload.pieces))
    for stage, first, stop in zip(layout.stages, (0, *layout.cuts), ends, strict=True):
        for name in stage.processors:
            units[name] |= {len(workload.blocks) + number: Span(0, 1) for number in range(first, stop)}
        for number, block in enumerate(workload.blocks):
            begin, end = lie.get(number, (first, stop))
            if number in lie and first <= begin and end <= stop:
                for tile in stage.cut(samples=workload.samples, units=block.units).tiles:
                    units[tile.processor][number] = tile.units
            elif first <= begin < stop:  # ranks of a stage share only what lies in it as a whole
                for name in stage.processors:
                    units[name][number] = Span(0, block.units)
    return units


def _pieces_of_blocks(workload: Workload) -> dict[int, tuple[int, int]]:
    """The first piece of each block, and the one behind its last, of those blocks that pieces know."""
    known = [(block, place, place + span) for place, piece in enumerate(workload.pieces) for block, span in piece.blocks]
    pairs = enumerate(zip(workload.blocks, known, strict=False))
    return {number: (place, stop) for number, (block, (own, place, stop)) in pairs if block == own}


def _unit_bytes(workload: Workload) -> dict[int, float]:
    """What moves with a unit of each block, and with each piece."""
    sizes = [workload.unit_moved_bytes(block) for block in workload.blocks]
    return dict(enumerate([*sizes, *(float(piece.parameters * workload.element_bytes) for piece in workload.pieces)]))


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
