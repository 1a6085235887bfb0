"""Who takes which units of which tensors from whom, as data: each rank what it lacks, from those who hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tatami.errors import PlanError
from tatami.tiling import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTake:
    """Rank `dest` takes `units` of the tensor `name` from rank `source`."""

    name: str
    source: int
    dest: int
    units: Span


def tensor_takes(
    held: Sequence[Mapping[str, Span]], needed: Sequence[Mapping[str, Span]], *, unit_sizes: Mapping[str, float]
) -> tuple[TensorTake, ...]:
    """From whom every rank takes what it needs and does not hold, of those who have sent least so far.

    Args:
        held: for each rank, the units of each tensor that it holds.
        needed: for each rank, the units of each tensor that it is to hold.
        unit_sizes: of a unit of each tensor.

    Raises:
        PlanError: no rank holds what another one needs.
    """
    sent = [0.0] * len(held)
    found: list[TensorTake] = []
    for dest, wanted in enumerate(needed):
        for name, units in wanted.items():
            own = held[dest].get(name, Span(0, 0))
            for missing in _without(units, own):
                position = missing.start
                while position < missing.stop:
                    holders = [rank for rank, each in enumerate(held) if name in each and _has(each[name], position)]
                    if not holders:
                        raise PlanError(f"no rank holds unit {position} of {name}, which rank {dest} is to have")
                    source = min(holders, key=sent.__getitem__)
                    stop = min(held[source][name].stop, missing.stop)
                    found.append(TensorTake(name=name, source=source, dest=dest, units=Span(position, stop)))
                    sent[source] += (stop - position) * unit_sizes[name]
                    position = stop
    return tuple(found)


def _has(span: Span, unit: int) -> bool:
    return span.start <= unit < span.stop


def _without(wanted: Span, held: Span) -> Iterator[Span]:
    """The parts of `wanted` above and below `held`."""
    common = wanted & held
    if not common.size:
        common = Span(wanted.start, wanted.start)
    for part in (Span(wanted.start, common.start), Span(common.stop, wanted.stop)):
        if part.size:
            yield part
