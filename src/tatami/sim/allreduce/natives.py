"""What a library does when it is asked for a collective of its own: a stated algorithm for each, by the size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tatami.collective import AbstractPattern, Native, Phase, RankGroup, Role, Schedule, Step, Via
from tatami.collective.direct import DirectReduceScatter
from tatami.collective.halving import Doubling, Halving
from tatami.collective.ring import RingAllGather, RingReduceScatter
from tatami.errors import InputError

_KIB = 1024
_SHORT_ALL_REDUCE_BYTES = 2 * _KIB
_SHORT_ALL_GATHER_BYTES = 80 * _KIB
_LONG_BYTES = 512 * _KIB

NativeRule = Callable[[Role, int, int], tuple[AbstractPattern, ...]]
"""What a library does: (role, members, bytes of the group's range) -> patterns, one after the other."""


def _mpich(role: Role, members: int, size_bytes: int) -> tuple[AbstractPattern, ...]:
    power = members & (members - 1) == 0
    if role is Role.ALL_GATHER:
        short = size_bytes < (_LONG_BYTES if power else _SHORT_ALL_GATHER_BYTES)
        return (Doubling() if short else RingAllGather(),)
    if role is Role.REDUCE_SCATTER:
        short = size_bytes < _LONG_BYTES
        return (Halving() if short else DirectReduceScatter(via=Via.MESSAGE, ordered=True),)
    return (WholeDoubling(),) if size_bytes <= _SHORT_ALL_REDUCE_BYTES else (Halving(), Doubling())


def _always(reduce_scatter: AbstractPattern, all_gather: AbstractPattern, *all_reduce: AbstractPattern) -> NativeRule:
    """The same patterns at any size; all-reduces by the first two unless others are given."""
    patterns = {
        Role.REDUCE_SCATTER: (reduce_scatter,),
        Role.ALL_GATHER: (all_gather,),
        Role.ALL_REDUCE: all_reduce or (reduce_scatter, all_gather),
    }
    return lambda role, members, size_bytes: patterns[role]  # noqa: ARG005 - whatever the size


def find_native(name: str) -> NativeRule:
    """The rule of this name.

    Raises:
        InputError: there is none; lists those there are.
    """
    if name not in NATIVES:
        raise InputError(f"there is no rule {name!r} for native collectives; choose one of: {', '.join(NATIVES)}")
    return NATIVES[name]


def expand(schedule: Schedule, *, rule: NativeRule, element_bytes: int = 4) -> Schedule:
    """The schedule with every native phase written as the patterns that `rule` chooses for its largest group."""
    phases: list[Phase] = []
    for phase in schedule.phases:
        if not isinstance(phase.what, Native):
            phases.append(phase)
            continue
        size_bytes = max(group.size for group in phase.groups) * element_bytes
        members = max(group.members for group in phase.groups)
        phases += [replace(phase, what=what) for what in rule(phase.what.role, members, size_bytes)]
    return replace(schedule, phases=tuple(phases))


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


NATIVES: dict[str, NativeRule] = {
    "mpich": _mpich,
    "optimal": _always(Halving(), Doubling()),
    "ring": _always(RingReduceScatter(), RingAllGather()),
    "whole": _always(RingReduceScatter(), RingAllGather(), WholeDoubling()),
}
"""By size, as Thakur, Rabenseifner and Gropp 2005 describe MPICH; halving and doubling; rings; and rings, with all-reduces by
doubling of the whole vector."""
