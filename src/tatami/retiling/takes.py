"""Who takes which units of what from whom, as data: each holder what it lacks, from those who have it.

What moves may be the tensors of a network, or its blocks and pieces. A holder is a rank, or something beside a rank's own, such
as the mirror in which it keeps another rank's units.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tatami.errors import PlanError
from tatami.tiling import Span, Tiling

_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTake(Generic[_Name]):
    """Holder `dest` takes `units` of `name` from holder `source`, which may be itself."""

    name: _Name
    source: int
    dest: int
    units: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing(Generic[_Name]):
    """No holder has `units` of `name`, which holder `dest` needs."""

    name: _Name
    dest: int
    units: Span


def unit_takes(
    held: Sequence[Mapping[_Name, Span]],
    needed: Sequence[Mapping[_Name, Span]],
    *,
    unit_sizes: Mapping[_Name, float],
    ranks: Sequence[int] | None = None,
    groups: Sequence[object] = (),
) -> tuple[list[UnitTake[_Name]], list[Missing[_Name]]]:
    """From whom every holder takes all that it needs, and what none has.

    What it holds itself, or another holder of its rank does, it takes there; the rest from the ranks of its own group that have
    it, or else from all that have it, in pieces, each from the one that has sent least by then.

    Args:
        held: for each holder, the units of each name that it has.
        needed: for each holder, the units of each name that it is to have.
        unit_sizes: of a unit of each name.
        ranks: the rank of each holder; None: each is a rank of its own.
        groups: of each rank, such as its host, where they are known.
    """
    ranks = range(len(held)) if ranks is None else ranks
    group_of = [groups[rank] for rank in ranks] if groups else [None] * len(held)
    holders = _holders(held)
    sent = [0.0] * (max(ranks, default=-1) + 1)
    found: list[UnitTake[_Name]] = []
    missing: list[Missing[_Name]] = []
    for dest, wanted in enumerate(needed):
        rank, group = ranks[dest], group_of[dest]
        for name, units in wanted.items():
            own = held[dest].get(name, _NOTHING) & units
            if own.size:
                found.append(UnitTake(name=name, source=dest, dest=dest, units=own))
            for part in _without(units, own):
                for stretch, having in holders[name].over(part) if name in holders else [(part, ())]:
                    if not having:
                        missing.append(Missing(name=name, dest=dest, units=stretch))
                        continue
                    near: Sequence[int] = [each for each in having if ranks[each] == rank]
                    near = near or [each for each in having if group_of[each] == group] or having
                    most = max(1, -(-stretch.size // len(near)))
                    for start in range(stretch.start, stretch.stop, most):
                        source = min(zip([sent[ranks[each]] for each in near], near, strict=True))[1]
                        piece = Span(start, min(start + most, stretch.stop))
                        found.append(UnitTake(name=name, source=source, dest=dest, units=piece))
                        if ranks[source] != rank:
                            sent[ranks[source]] += piece.size * unit_sizes[name]
    return _joined(found), missing


_NOTHING = Span(0, 0)


class _Holders:
    """Who has which units of one name: stretches that have the same holders in all their units."""

    def __init__(self, spans: Sequence[tuple[Span, int]]) -> None:
        self._edges = sorted({edge for span, _ in spans for edge in (span.start, span.stop)})
        self._having: list[list[int]] = [[] for _ in self._edges]
        for span, holder in spans:
            for index in range(bisect_left(self._edges, span.start), bisect_left(self._edges, span.stop)):
                self._having[index].append(holder)

    def over(self, part: Span) -> Iterator[tuple[Span, Sequence[int]]]:
        """The stretches of `part`, with those who have them."""
        position = part.start
        while position < part.stop:
            index = bisect_right(self._edges, position) - 1
            stop = min(self._edges[index + 1] if index + 1 < len(self._edges) else part.stop, part.stop)
            yield Span(position, stop), self._having[index] if index >= 0 else ()
            position = stop


def _holders(held: Sequence[Mapping[_Name, Span]]) -> dict[_Name, _Holders]:
    spans: dict[_Name, list[tuple[Span, int]]] = {}
    for number, each in enumerate(held):
        for name, units in each.items():
            if units.size:
                spans.setdefault(name, []).append((units, number))
    return {name: _Holders(each) for name, each in spans.items()}


def _joined(found: Sequence[UnitTake[_Name]]) -> list[UnitTake[_Name]]:
    """Adjacent stretches on the same way as one."""
    joined: list[UnitTake[_Name]] = []
    for each in found:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.name, last.source, last.dest) == (each.name, each.source, each.dest)
            and last.units.stop == each.units.start
        ):
            joined[-1] = replace(last, units=Span(last.units.start, each.units.stop))
        else:
            joined.append(each)
    return joined


def _without(wanted: Span, own: Span) -> Iterator[Span]:
    """The parts of `wanted` above and below `own`, which is a part of it or nothing."""
    if not own.size:
        own = Span(wanted.start, wanted.start)
    for part in (Span(wanted.start, own.start), Span(own.stop, wanted.stop)):
        if part.size:
            yield part


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
