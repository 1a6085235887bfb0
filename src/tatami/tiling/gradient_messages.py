"""Gradient sums as data: who sends which units to whom, so that every owner ends with the sum over the replicas.

The unit axis is cut at the union of all replicas' cuts. Each segment, a group, has one owner in every replica; the C owners
sum it among themselves. There is no funnel: a rank that owns more units sends more, and none sends for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tatami.errors import PlanError
from tatami.tiling.span import Span, largest_remainder, spans
from tatami.tiling.tiling import Tiling

Method = Literal["direct", "reduce-scatter"]


@dataclass(frozen=True, kw_only=True)
class Message:
    """All that one processor sends another in one phase.

    What arrives in phase 0 is added to what the receiver has, what arrives in phase 1 replaces it. Every rank sends what it
    had at the beginning of the phase.

    Attributes:
        phase: 0 or 1; a phase begins for a processor when it has all messages of the one before.
        source: the sender's name.
        dest: the receiver's name.
        spans: which units, of which block (its index among the tilings); in order, none twice.
        carries_riders: whether replicated gradients ride on it (see `tatami.tiling.traffic`).
    """

    phase: int
    source: str
    dest: str
    spans: tuple[tuple[int, Span], ...]
    carries_riders: bool = False


def gradient_messages(
    tilings: Sequence[Tiling], *, method: Method, shares: Mapping[str, float] | None = None
) -> tuple[Message, ...]:
    """The messages that sum every unit over its owners: at most one from one processor to another in each phase.

    Args:
        tilings: one for each block of the network: the same processors in the same replicas, each block's own units.
        method: "direct": one phase, every owner sends all its units to each other owner; the bytes grow with C - 1.
            "reduce-scatter": two phases. Every group is cut into C chunks of whole units, and chunk c is summed by its owner
            in replica c, who then gives the sum to the other owners: 2 (C - 1) / C of the bytes. For C = 2 both carry the same
            bytes, and "direct" needs half the messages.
        shares: the owners of a group sum it in proportion to these (see `tatami.tiling.summing`); None: in equal parts.

    Returns:
        Messages in the order of phase, source and dest (as the tiles lie, replica by replica). None carries nothing.

    Raises:
        PlanError: an unknown method, no tiling, or tilings whose replicas differ.
    """
    if method not in ("direct", "reduce-scatter"):
        raise PlanError(f"there is no method {method!r} of gradient sums; choose direct or reduce-scatter")
    order = _common_order(tilings)
    bundles: dict[tuple[int, str, str], list[tuple[int, Span]]] = {}
    due = dict.fromkeys(order, 0.0)
    for block, tiling in enumerate(tilings):
        if method == "direct":
            transfers = _direct(tiling)
        else:
            transfers = _reduce_scatter(tiling, _chunks(tiling) if shares is None else _weighted_chunks(tiling, shares, due))
        for phase, source, dest, units in transfers:
            bundle = bundles.setdefault((phase, source, dest), [])
            if bundle and bundle[-1][0] == block and bundle[-1][1].stop == units.start:
                bundle[-1] = (block, Span(bundle[-1][1].start, units.stop))
            else:
                bundle.append((block, units))
    keys = sorted(bundles, key=lambda key: (key[0], order[key[1]], order[key[2]]))
    return tuple(Message(phase=key[0], source=key[1], dest=key[2], spans=tuple(bundles[key])) for key in keys)


def _direct(tiling: Tiling) -> Iterator[tuple[int, str, str, Span]]:
    for group in tiling.owned_units:
        for source in group.owners:
            for dest in group.owners:
                if source != dest:
                    yield 0, source, dest, group.units


def _reduce_scatter(tiling: Tiling, chunks: Iterator[Sequence[int]]) -> Iterator[tuple[int, str, str, Span]]:
    # Example: 6 units that a, b and c own, in chunks of 2. Phase 0: a is sent units 0 and 1 by b and by c, b is sent 2 and 3, c
    # is sent 4 and 5. Phase 1: each sends its 2 sums to both others. So each sends 4 + 4 = 8 units, and would send 12 directly.
    for group, sizes in zip(tiling.owned_units, chunks, strict=True):
        start = group.units.start
        for summer, chunk in zip(group.owners, spans(sizes), strict=True):
            if chunk.size == 0:
                continue
            units = Span(start + chunk.start, start + chunk.stop)
            for other in group.owners:
                if other != summer:
                    yield 0, other, summer, units
                    yield 1, summer, other, units


def _chunks(tiling: Tiling) -> Iterator[Sequence[int]]:
    """How many of each strip's units the owner in each replica sums: equal parts."""
    num_replicas = len(tiling.replicas)
    turn = 0
    for group in tiling.owned_units:
        share, left = divmod(group.units.size, num_replicas)
        # Units that do not divide go to the replicas in turn, so that thin groups do not all burden the first replica.
        extra = {(turn + index) % num_replicas for index in range(left)}
        turn = (turn + left) % num_replicas
        yield [share + (replica in extra) for replica in range(num_replicas)]


def _weighted_chunks(tiling: Tiling, shares: Mapping[str, float], due: dict[str, float]) -> Iterator[Sequence[int]]:
    """As `_chunks`, in proportion to `shares`.

    Args:
        tiling: of one block.
        shares: of all processors.
        due: what a processor has summed too little of so far, in fractions of a block. Six heads over eight replicas are one or
            none for each; over several blocks all come to their share.
    """
    for group in tiling.owned_units:
        own = [shares[owner] for owner in group.owners]
        if not any(own):
            own = [1.0] * len(own)
        ideal = [
            group.units.size * share / sum(own) + due[owner] * tiling.units
            for owner, share in zip(group.owners, own, strict=True)
        ]
        wanted_here = [max(0.0, each) for each in ideal]
        sizes = largest_remainder(wanted_here if any(wanted_here) else own, total=group.units.size)
        for owner, wanted, size in zip(group.owners, ideal, sizes, strict=True):
            due[owner] = (wanted - size) / tiling.units
        yield sizes


def _common_order(tilings: Sequence[Tiling]) -> dict[str, int]:
    """The place of every processor in the tiles' order, which all tilings must share."""
    if not tilings:
        raise PlanError("gradient sums need at least one tiling")
    replicas = [[[tile.processor for tile in replica] for replica in tiling.replicas] for tiling in tilings]
    for index, other in enumerate(replicas):
        if other != replicas[0]:
            raise PlanError(f"the tilings of one network must have the same replicas: 0 has {replicas[0]}, {index} has {other}")
    return {tile.processor: index for index, tile in enumerate(tilings[0].tiles)}
