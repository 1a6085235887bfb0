"""Everyone to everyone, directly: the patterns of one-sided reduce-scatters and of shared windows.

No partial sum travels: each rank's own elements go straight to the rank that completes them. It moves (k-1)/k of the vector, as
every reduce-scatter, in k - 1 transfers for each rank that need no partner in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tatami.collective.pattern import AbstractPattern
from tatami.collective.step import RankGroup, Role, Step, Via


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

    def num_rounds(self, members: int) -> int:  # noqa: ARG002 - any number of members takes one round
        return 1

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:  # noqa: ARG002 - there is but one
        k = group.members
        for distance in range(1, k):
            to, by = (member - distance) % k, (member + distance) % k
            yield from group.transfer(source=member, target=to, first=member, reduce=False, via=self.via)
            yield from group.transfer(source=by, target=member, first=by, reduce=False, via=self.via)


@dataclass(frozen=True, kw_only=True)
class SharedAllReduce(AbstractPattern):
    """Member i adds everyone's part i into its own vector, then stores it into everyone's: one round, two barriers.

    Nobody else touches part i of any vector, so nothing need be waited for between the sum and the stores.
    """

    role = Role.ALL_REDUCE
    title = "all-reduce in a shared window"

    def num_rounds(self, members: int) -> int:  # noqa: ARG002 - any number of members takes one round
        return 1

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
