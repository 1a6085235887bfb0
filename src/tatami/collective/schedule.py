"""An all-reduce as data: what every executor, the cost model, the simulator and `verify` read.

The vector
    Every rank has one vector of `size` elements, and the schedule works on it in place: a step takes elements
    `start .. stop` of its source's vector to *the same* elements of its target's vector. There is no other buffer that a
    schedule speaks of. At the start rank r's vector holds r's contribution; at the end every vector holds the reduction
    of all of them. A schedule knows no dtype and no operator: `reduce` means the operation that the caller chose.

The shape
    Schedule -> phases -> rounds -> steps. A `Phase` works on `RankGroup`s: ranks that together own a range of elements. All
    groups of a phase do the same thing (`what`), each among its own ranks and inside its own range:

    * `Native(role)`: the communicator's own collective over the group's ranks, on the group's range;
    * an `AbstractPattern`: a rule, a few bytes, that unrolls into steps as they are asked for; so a ring of 10,000 ranks
      costs no memory, and neither does a message of any size;
    * `Explicit`: the steps written out, for schedules made or changed by hand.

    A rank may be in several groups of a phase; their ranges are then disjoint. It takes them in the order in which the
    phase lists them, which is the same everywhere, so that blocking calls on overlapping groups cannot deadlock.

How a rank runs it
    for phase in schedule.phases:
        native:  for group in phase.groups_of(rank): call the collective on elements group.start .. group.stop
        else:    for round in range(phase.num_rounds): carry out phase.steps_of(rank, round=round), then go on

    A rank opens the epochs of all its groups, in order, acts, and closes them in that order.

    `steps_of` lists every step in which the rank is source or target. It acts in those it issues (`Step.issuer`) and, for a
    message, in those it receives. Messages between one pair of ranks in one round are listed in the same order by both.
    A round is one synchronisation epoch. In it, a rank

    * MESSAGE: sends what it is the source of and receives what it is the target of, all at once (post all, wait for all).
      What arrives with `reduce` needs a scratch space (`Schedule.scratch_size`) and is added when the round's transfers are
      done, in the order of the ranks it comes from, the target's own elements in their place among them: so ranks that add
      the same contributions get the same bits;
    * PUT: writes into the target's window: a put where `reduce` is false, an accumulate (atomic by element) where it is true;
    * LOAD: the *target* reads the source's vector in their shared window, and copies or adds it into its own;
    * STORE: the source writes its elements into the target's vector in their shared window.

    MESSAGE and PUT read what was there when the round began. LOADs and STOREs that one rank issues in one round take
    effect one after the other, as listed; an executor may cut them into blocks that fit its cache, block after block.
    Nothing else in a round may touch what a step of that round writes, but for messages that are sent from where others
    are added later: `verify` refuses it.

Synchronisation (`Phase.sync`)
    What a round waits for is the phase's `Sync`; see there. With every kind, a rank has left the phase before when it takes
    part in opening an epoch, and what it was to receive in a phase has arrived when it leaves that phase.

Parts
    Part i of a group of k is elements start + size*i//k .. start + size*(i+1)//k of its range: sizes differ by one at most and
    some are empty where there are fewer elements than ranks. A phase of role REDUCE_SCATTER ends with part i complete
    on member i (the rest of that member's range is then undefined); one of role ALL_GATHER begins with it. Native collectives
    use these parts as their counts.

No step and no group is ever empty, no group has fewer than two ranks, and a schedule of one rank or of no elements has no
phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tatami.collective.pattern import AbstractPattern, Explicit, Native
from tatami.collective.step import RankGroup, Role, Step, Sync, Via
from tatami.errors import ScheduleError


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The same work in every one of `groups`."""

    groups: tuple[RankGroup, ...]
    what: AbstractPattern | Native | Explicit
    sync: Sync = Sync.ARRIVAL

    @property
    def role(self) -> Role:
        return self.what.role

    @property
    def title(self) -> str:
        """For tables and messages: `reduce-scatter by ring, 4 groups of 8`."""
        sizes = sorted({group.members for group in self.groups})
        members = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"{self.what.title}, {len(self.groups)} group{'s' * (len(self.groups) > 1)} of {members}"

    @cached_property
    def num_rounds(self) -> int:
        """Rounds until the largest group is done; smaller ones may be done before. 0 for a native."""
        if isinstance(self.what, Explicit):
            return len(self.what.rounds)
        if isinstance(self.what, Native):
            return 0
        return max((self.what.num_rounds(members) for members in {group.members for group in self.groups}), default=0)

    @cached_property
    def memberships(self) -> dict[int, tuple[tuple[RankGroup, int], ...]]:
        """For each rank that takes part: its groups, in order, and which member of each it is."""
        result: dict[int, tuple[tuple[RankGroup, int], ...]] = {}
        for group in self.groups:
            for member, rank in enumerate(group.ranks):
                result[rank] = (*result.get(rank, ()), (group, member))
        return result

    @cached_property
    def _explicit_steps(self) -> dict[tuple[int, int], list[Step]]:
        """By rank and round: looked up by thousands of ranks, each of which is in few of the steps."""
        found: dict[tuple[int, int], list[Step]] = {}
        for round_, steps in enumerate(self.what.rounds if isinstance(self.what, Explicit) else ()):
            for step in steps:
                for rank in {step.source, step.target}:
                    found.setdefault((rank, round_), []).append(step)
        return found

    def groups_of(self, rank: int) -> tuple[RankGroup, ...]:
        """The groups that `rank` is in, in the order in which it takes them."""
        return tuple(group for group, _ in self.memberships.get(rank, ()))

    def steps_of(self, rank: int, *, round: int) -> Iterator[Step]:
        """The steps of a round in which `rank` is source or target. None for a native."""
        if isinstance(self.what, Explicit):
            yield from self._explicit_steps.get((rank, round), ())
        elif isinstance(self.what, AbstractPattern):
            for group, member in self.memberships.get(rank, ()):
                if round < self.what.num_rounds(group.members):
                    yield from self.what.steps_of(group, member=member, round=round)

    def steps(self, round: int) -> Iterator[Step]:
        """All steps of a round, each once, by issuer. None for a native."""
        if isinstance(self.what, Explicit):
            yield from self.what.rounds[round]
            return
        for rank in self.memberships:
            yield from (step for step in self.steps_of(rank, round=round) if step.issuer == rank)

    def distinct_rounds(self) -> Iterator[tuple[int, int]]:
        """(round, how many rounds are like it), so that a price need not unroll a long ring."""
        sizes = {group.members for group in self.groups}
        if isinstance(self.what, AbstractPattern) and len(sizes) == 1:
            yield from self.what.distinct_rounds(sizes.pop())
        else:
            yield from ((round_, 1) for round_ in range(self.num_rounds))

    def placed(self, ranks: tuple[int, ...], *, offset: int) -> Phase:
        """The same phase with rank r become `ranks[r]`, and element e become `offset` + e."""
        groups = tuple(
            RankGroup(ranks=tuple(ranks[rank] for rank in group.ranks), start=group.start + offset, stop=group.stop + offset)
            for group in self.groups
        )
        if not isinstance(self.what, Explicit):
            return replace(self, groups=groups)
        rounds = tuple(
            tuple(
                replace(
                    step,
                    source=ranks[step.source],
                    target=ranks[step.target],
                    start=step.start + offset,
                    stop=step.stop + offset,
                )
                for step in steps
            )
            for steps in self.what.rounds
        )
        return replace(self, groups=groups, what=replace(self.what, rounds=rounds))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One all-reduce of `size` elements over ranks 0 .. `ranks` - 1.

    Attributes:
        algorithm: the name in the registry.
        ranks: how many.
        size: elements of the vector.
        phases: one after the other, for each rank; no rank waits for others between them but as their `sync` says.
        order: in which order contributions are summed, in words.
        fixed_order: whether that order is the same in every run, so that results are the same to the bit. They are the same
            on all ranks in any case: every element is completed in one place and copied from there (natives: as their
            library promises).
    """

    algorithm: str
    ranks: int
    size: int
    phases: tuple[Phase, ...]
    order: str
    fixed_order: bool

    def __post_init__(self) -> None:
        check_problem(self.ranks, self.size)

    @property
    def one_sided(self) -> bool:
        """Whether an executor needs windows for remote puts."""
        return any(phase.sync.one_sided for phase in self.phases)

    @property
    def shared(self) -> bool:
        """Whether an executor needs the vectors of one host's ranks in a shared window."""
        return any(phase.sync is Sync.BARRIER for phase in self.phases)

    def scratch_size(self, rank: int) -> int:
        """Elements that `rank` must be able to receive beside its vector: the most that comes to be reduced in one round."""
        return max(
            (
                sum(
                    step.size
                    for step in phase.steps_of(rank, round=round_)
                    if step.target == rank and step.reduce and step.via is Via.MESSAGE
                )
                for phase in self.phases
                for round_ in range(phase.num_rounds)
            ),
            default=0,
        )

    def average_at(self, rank: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Where an average is divided with least work: (index of a phase, the (start, stop) to divide just before it).

        Before a last all-gather each rank needs only its own parts complete, 1/M of the vector in a torus; one that is not in
        it has everything by then. Where the schedule does not end in an all-gather the index is `len(phases)`.
        """
        whole = ((0, self.size),) if self.size else ()
        if not self.phases or self.phases[-1].role is not Role.ALL_GATHER:
            return len(self.phases), whole
        if rank not in self.phases[-1].memberships:
            return len(self.phases) - 1, whole
        parts = (group.part(member) for group, member in self.phases[-1].memberships[rank])
        return len(self.phases) - 1, tuple((start, stop) for start, stop in parts if start < stop)

    def placed_phases(self, ranks: tuple[int, ...], *, offset: int) -> tuple[Phase, ...]:
        """The phases as part of a larger schedule: rank r is `ranks[r]` there, and element e is `offset` + e."""
        return tuple(phase.placed(ranks, offset=offset) for phase in self.phases)

    def explicit(self) -> Schedule:
        """The same schedule with every pattern written out: for looking at and for changing by hand. Costs memory."""
        phases = tuple(
            phase
            if isinstance(phase.what, Native)
            else replace(
                phase,
                what=Explicit(
                    role=phase.role,
                    rounds=tuple(tuple(phase.steps(round_)) for round_ in range(phase.num_rounds)),
                    title=phase.what.title,
                ),
            )
            for phase in self.phases
        )
        return replace(self, phases=phases)


def check_problem(ranks: int, size: int) -> None:
    """Refuse what no schedule can be built for.

    Raises:
        ScheduleError: fewer than one rank, or a negative number of elements.
    """
    if ranks < 1:
        raise ScheduleError(f"an all-reduce needs at least one rank, not {ranks}")
    if size < 0:
        raise ScheduleError(f"an all-reduce is over 0 or more elements, not {size}")
