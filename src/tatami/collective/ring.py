"""The ring: every rank talks to its two neighbours only, and all links are busy all the time.

2(k - 1) rounds of 1/k of the vector: 2(k-1) alpha + 2(k-1)/k n beta. Best for long vectors on few ranks; its latency grows
with the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tatami.collective.halves import Halves, flat
from tatami.collective.pattern import AbstractPattern
from tatami.collective.schedule import Schedule
from tatami.collective.step import RankGroup, Role, Step, Via


class _AbstractRing(AbstractPattern):
    def num_rounds(self, members: int) -> int:
        return members - 1

    def distinct_rounds(self, members: int) -> Iterator[tuple[int, int]]:
        # Every round moves every part once, each to a neighbour: only which part goes where turns.
        yield 0, members - 1


@dataclass(frozen=True, kw_only=True)
class RingReduceScatter(_AbstractRing):
    """In round t member i sends its partial sum of part i - 1 - t to member i + 1, which adds its own."""

    via: Via = Via.MESSAGE

    role = Role.REDUCE_SCATTER
    title = "reduce-scatter by ring"

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:
        yield from _hops(group, member=member, first=member - 1 - round, reduce=True, via=self.via)


@dataclass(frozen=True, kw_only=True)
class RingAllGather(_AbstractRing):
    """In round t member i sends part i - t, complete, to member i + 1."""

    via: Via = Via.MESSAGE

    role = Role.ALL_GATHER
    title = "all-gather by ring"

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:
        yield from _hops(group, member=member, first=member - round, reduce=False, via=self.via)


def _hops(group: RankGroup, *, member: int, first: int, reduce: bool, via: Via) -> Iterator[Step]:
    """What `member` sends to the next, part `first`, and what the one before sends to it, the part before."""
    k = group.members
    yield from group.transfer(source=member, target=(member + 1) % k, first=first % k, reduce=reduce, via=via)
    yield from group.transfer(source=(member - 1) % k, target=member, first=(first - 1) % k, reduce=reduce, via=via)


RING_ORDER = "part j of k: rank j + 1 first, then j + 2, ... around to j"

RING_HALVES = Halves(scatter=RingReduceScatter(), gather=RingAllGather(), order=RING_ORDER, fixed_order=True)


def ring(ranks: int, size: int) -> Schedule:
    """The ring over all ranks. Order of the sum: `RING_ORDER`, fixed."""
    return flat("ring", RING_HALVES, ranks=ranks, size=size)
