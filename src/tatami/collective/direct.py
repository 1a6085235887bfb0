"""Every rank to every other: an all-reduce of messages, and the patterns of one-sided reduce-scatters and shared windows.

No partial sum travels: each rank's own elements go straight to the rank that completes them. It moves (k-1)/k of the vector, as
every reduce-scatter, in k - 1 transfers for each rank that need no partner in between. So a slow rank does not hold up another
rank's messages but its own; a library's nonblocking all-reduce takes some 2 log k steps, each of which waits for a rank to
look after it, and on a host that has a tenth of a core a step is milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tatami.collective.halves import among_all
from tatami.collective.pattern import AbstractPattern
from tatami.collective.schedule import Schedule
from tatami.collective.step import RankGroup, Role, Step, Sync, Via

WHOLE_BYTES = 16 * 1024
"""Up to this size every rank sends its whole vector to all others, in one phase: a message costs more than its bytes."""
DIRECT_ORDER = "in the order of the ranks"


@dataclass(frozen=True, kw_only=True)
class DirectReduceScatter(AbstractPattern):
    """Part i of every member is reduced into member i.

    Attributes:
        via: PUT (each rank accumulates into the others) or LOAD (each rank reads the others).
        ordered: one contribution to each rank in a round, k - 1 rounds, so that accumulates arrive in a fixed order. Otherwise
            one round. LOADs are in order anyway: one rank makes them.
    """

    via: Via
    ordered: bool = False

    role = Role.REDUCE_SCATTER

    @property
    def title(self) -> str:
        how = {Via.PUT: "accumulates", Via.LOAD: "loads from a shared window"}.get(self.via, f"direct {self.via.value}s")
        return f"reduce-scatter by {'ordered ' * self.ordered}{how}"

    def num_rounds(self, members: int) -> int:
        return members - 1 if self.ordered else 1

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:
        k = group.members
        for distance in (round + 1,) if self.ordered else range(1, k):
            to, by = (member - distance) % k, (member + distance) % k
            yield from group.transfer(source=member, target=to, first=to, reduce=True, via=self.via)
            yield from group.transfer(source=by, target=member, first=member, reduce=True, via=self.via)


@dataclass(frozen=True, kw_only=True)
class DirectAllGather(AbstractPattern):
    """Part i of member i goes to every other, in one round."""

    via: Via

    role = Role.ALL_GATHER

    @property
    def title(self) -> str:
        return "all-gather by loads from a shared window" if self.via is Via.LOAD else f"all-gather by direct {self.via.value}s"

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:  # noqa: ARG002 - there is but one
        k = group.members
        for distance in range(1, k):
            to, by = (member - distance) % k, (member + distance) % k
            yield from group.transfer(source=member, target=to, first=member, reduce=False, via=self.via)
            yield from group.transfer(source=by, target=member, first=by, reduce=False, via=self.via)


@dataclass(frozen=True, kw_only=True)
class SharedAllReduce(AbstractPattern):
    """Member i adds part i of all members into its own vector, then stores it into theirs: one round, two barriers.

    No other rank touches part i of any vector, so ranks need not wait between the sum and the stores.
    """

    role = Role.ALL_REDUCE
    title = "all-reduce in a shared window"

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:  # noqa: ARG002 - there is but one
        k = group.members
        others = [(member + distance) % k for distance in range(1, k)]
        for other in others:
            yield from group.transfer(source=other, target=member, first=member, reduce=True, via=Via.LOAD)
        for other in others:
            yield from group.transfer(source=member, target=other, first=member, reduce=False, via=Via.STORE)
        for other in others:
            yield from group.transfer(source=member, target=other, first=other, reduce=True, via=Via.LOAD)
            yield from group.transfer(source=other, target=member, first=other, reduce=False, via=Via.STORE)


@dataclass(frozen=True, kw_only=True)
class WholeExchange(AbstractPattern):
    """Every member sends all it has to all others, and adds what comes."""

    role = Role.ALL_REDUCE
    title = "all-reduce by whole messages"

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:  # noqa: ARG002 - there is but one
        k = group.members
        for distance in range(1, k):
            for source, target in ((member, (member - distance) % k), ((member + distance) % k, member)):
                yield from group.transfer(source=source, target=target, first=0, num_parts=k, reduce=True, via=Via.MESSAGE)


def sends_whole(ranks: int, size: float, *, element_bytes: int) -> bool:
    """Whether `direct` sends whole vectors: between two ranks, where there are fewer elements than ranks, and short ones."""
    return ranks == 2 or size < ranks or size * element_bytes * (ranks - 1) <= WHOLE_BYTES


def direct(ranks: int, size: int, *, element_bytes: int = 4, decided_by: int | None = None) -> Schedule:
    """Straight from every rank to every other, in one phase (`sends_whole`) or two. Order of the sum: by rank, fixed.

    Args:
        ranks: P.
        size: elements.
        element_bytes: of one.
        decided_by: elements of the whole of which this is a segment: all its segments are summed alike. None: it is the whole.
    """
    patterns: tuple[AbstractPattern, ...] = (DirectReduceScatter(via=Via.MESSAGE), DirectAllGather(via=Via.MESSAGE))
    if sends_whole(ranks, size if decided_by is None else decided_by, element_bytes=element_bytes):
        patterns = (WholeExchange(),)
    phases = ((pattern, Sync.ARRIVAL) for pattern in patterns)
    return among_all("direct", *phases, ranks=ranks, size=size, order=DIRECT_ORDER, fixed_order=True)
