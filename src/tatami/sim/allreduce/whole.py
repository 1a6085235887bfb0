"""Recursive doubling of the whole vector: the fewest rounds, and log2(k) times the bytes.

What libraries use on short messages, where latency is all (Thakur, Rabenseifner, Gropp 2005, section 4.4). It is for the
simulator: two ranks add to what they are sending to each other, which a schedule of the library's own never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tatami.collective import AbstractPattern, RankGroup, Role, Step, Via


@dataclass(frozen=True, kw_only=True)
class WholeDoubling(AbstractPattern):
    """In round t member R and member R xor 2^t add each other's vectors.

    Members whose number is not a power of two fold: the first 2 r of them pair up, the even ones give theirs to the odd ones,
    who take part for both and return the sum.
    """

    via: Via = Via.MESSAGE

    role = Role.ALL_REDUCE
    title = "all-reduce by doubling of the whole"

    def num_rounds(self, members: int) -> int:
        doublings = members.bit_length() - 1
        return doublings + (2 if members > 1 << doublings else 0)

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:
        doublings = group.members.bit_length() - 1
        folded = group.members - (1 << doublings)
        if folded and round in (0, doublings + 1):
            last = round > 0
            if member < 2 * folded:
                even = member - member % 2
                source, target = (even + 1, even) if last else (even, even + 1)
                yield from self._whole(group, source, target, reduce=not last)
            return
        if member < 2 * folded and member % 2 == 0:
            return
        active = member - folded if member >= 2 * folded else member // 2
        other = active ^ (1 << (round - (1 if folded else 0)))
        peer = other + folded if other >= folded else 2 * other + 1
        yield from self._whole(group, member, peer, reduce=True)
        yield from self._whole(group, peer, member, reduce=True)

    def _whole(self, group: RankGroup, source: int, target: int, *, reduce: bool) -> Iterator[Step]:
        yield from group.transfer(source=source, target=target, first=0, num_parts=group.members, reduce=reduce, via=self.via)
