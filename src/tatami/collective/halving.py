"""Recursive halving, then doubling: logarithmic rounds at the ring's bandwidth.

2 ceil(log2 k) alpha + 2(k-1)/k n beta, for every k. Powers of two pair rank R with R xor 2^i (Thakur, Rabenseifner, Gropp
2005). Other numbers of ranks are commonly folded to a power of two, which costs two more rounds of the whole vector; here they
run on a circulant instead: rank R passes all it holds to R - 2^i, the dissemination of Bruck et al. 1997 written to the final
addresses, with no more rounds than the next power of two and no byte more than the ring. Backwards it is a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tatami.collective.halves import Halves, flat
from tatami.collective.pattern import AbstractPattern
from tatami.collective.schedule import Schedule
from tatami.collective.step import RankGroup, Role, Step, Via


@dataclass(frozen=True, kw_only=True)
class Doubling(AbstractPattern):
    """All-gather: in round t each member passes on the 2^t parts it holds, so that holdings double."""

    via: Via = Via.MESSAGE

    role = Role.ALL_GATHER

    @property
    def title(self) -> str:
        return f"all-gather by doubling{' puts' * (self.via is Via.PUT)}"

    def num_rounds(self, members: int) -> int:
        return num_doublings(members)

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:
        taker, giver = _peers(member, members=group.members, doubling=round)
        for source, target in ((member, taker), (giver, member)):
            first, count = _holding(source, members=group.members, doubling=round)
            yield from group.transfer(source=source, target=target, first=first, num_parts=count, reduce=False, via=self.via)


@dataclass(frozen=True, kw_only=True)
class Halving(AbstractPattern):
    """Reduce-scatter: `Doubling` run backwards, every copy out become a sum coming in."""

    via: Via = Via.MESSAGE

    role = Role.REDUCE_SCATTER
    title = "reduce-scatter by halving"

    def num_rounds(self, members: int) -> int:
        return num_doublings(members)

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:
        doubling = num_doublings(group.members) - 1 - round
        taker, giver = _peers(member, members=group.members, doubling=doubling)
        for source, target in ((member, giver), (taker, member)):
            first, count = _holding(target, members=group.members, doubling=doubling)
            yield from group.transfer(source=source, target=target, first=first, num_parts=count, reduce=True, via=self.via)


def num_doublings(members: int) -> int:
    """ceil(log2 members): rounds until one has become all."""
    return (members - 1).bit_length()


def _peers(member: int, *, members: int, doubling: int) -> tuple[int, int]:
    """(to whom `member` passes its holding, who passes its own to `member`) in this round of the all-gather."""
    distance = 1 << doubling
    if members & (members - 1) == 0:
        return member ^ distance, member ^ distance
    return (member - distance) % members, (member + distance) % members


def _holding(member: int, *, members: int, doubling: int) -> tuple[int, int]:
    """(first part, how many) that `member` passes on in this round: all it holds, less what the last round does not lack."""
    distance = 1 << doubling
    if members & (members - 1) == 0:
        return member & -distance, distance
    return member, min(distance, members - distance)


HALVING_ORDER = "a binary tree over the ranks, farthest partners first"

HALVING_HALVES = Halves(scatter=Halving(), gather=Doubling(), order=HALVING_ORDER, fixed_order=True)


def halving_doubling(ranks: int, size: int) -> Schedule:
    """Recursive halving-doubling over all ranks. Order of the sum: a tree, `HALVING_ORDER`, fixed."""
    return flat("halving_doubling", HALVING_HALVES, ranks=ranks, size=size)
