"""Proof that a schedule delivers: every contribution reaches every rank exactly once, and nothing races.

The proof is symbolic. The vector is cut at every bound that any step or part has; for each rank and each elementary segment
between two cuts it tracks the set of ranks whose contribution is summed there. A sum of two sets that meet would count a
contribution twice, which nothing can undo, so it is refused on the spot; sets are bits of an integer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NoReturn

from tatami.collective.pattern import Explicit, Native
from tatami.collective.schedule import Phase, Schedule
from tatami.collective.step import RankGroup, Role, Step, Sync, Via
from tatami.errors import ScheduleError

_FITTING = {
    Via.MESSAGE: (Sync.ARRIVAL,),
    Via.PUT: (Sync.FENCE, Sync.PSCW, Sync.LOCK),
    Via.LOAD: (Sync.BARRIER,),
    Via.STORE: (Sync.BARRIER,),
}


def verify(schedule: Schedule, *, hosts: Sequence[str] | None = None) -> None:
    """Prove that the schedule is an all-reduce, or say in words what is first wrong with it.

    Checked: groups are disjoint and in range; steps stay inside a group; both ends of a step list it, messages in the same
    order; the synchronisation fits; no two accesses of a round race, nor, under LOCK, of a phase; no contribution is
    counted twice, and no rank is sent what it has; and at the end every rank has every contribution to every element.

    Args:
        schedule: of any builder, or written by hand. Costs ranks x segments: meant for hundreds of ranks, not thousands.
        hosts: the host of each rank, if loads and stores are to be checked for staying inside hosts.

    Raises:
        ScheduleError: the first violation, with its phase, round and step.
    """
    _Proof(schedule, hosts=hosts).run()


@dataclass(frozen=True, kw_only=True)
class _Access:
    """One step's reading or writing of one segment on one rank."""

    step: Step
    writes: bool

    def races(self, other: _Access) -> bool:
        if not (self.writes or other.writes):
            return False
        one, two = self.step, other.step
        if one.via.local and two.via.local and one.issuer == two.issuer:
            return False  # one rank makes them, one after the other
        if all(access.step.via is Via.MESSAGE and (access.step.reduce or not access.writes) for access in (self, other)):
            return False  # what comes to be added is added when all that is sent from here has gone
        # Sums add up in any number: messages are added by their target in order, accumulates are atomic.
        sums = self.writes and other.writes and one.reduce and two.reduce
        return not (sums and one.via is two.via and not one.via.local)


class _Proof:
    """The state of one proof: which contributions are where."""

    def __init__(self, schedule: Schedule, *, hosts: Sequence[str] | None) -> None:
        if hosts is not None and len(hosts) != schedule.ranks:
            raise ScheduleError(f"{len(hosts)} hosts are named for the {schedule.ranks} ranks of {schedule.algorithm}")
        self.schedule = schedule
        self.hosts = hosts
        self.where = schedule.algorithm
        self.cuts = sorted(set(_cuts(schedule)))
        self.index = {cut: number for number, cut in enumerate(self.cuts)}
        # None: undefined, as what a native reduce-scatter leaves behind.
        self.has: list[list[int | None]] = [[1 << rank] * (len(self.cuts) - 1) for rank in range(schedule.ranks)]

    def run(self) -> None:
        for number, phase in enumerate(self.schedule.phases):
            self.where = f"{self.schedule.algorithm}, phase {number} ({phase.title})"
            self._check_groups(phase)
            if isinstance(phase.what, Native):
                for group in phase.groups:
                    self._native(phase.what.role, group)
                continue
            touched: dict[tuple[int, int], Step] = {}
            for round_ in range(phase.num_rounds):
                self.where = f"{self.schedule.algorithm}, phase {number} ({phase.title}), round {round_}"
                self._round(phase, round_, touched)
        self.where = f"{self.schedule.algorithm}, at the end"
        self._check_delivery()

    # -- one round ------------------------------------------------------------------------------------------------

    def _round(self, phase: Phase, round_: int, touched: dict[tuple[int, int], Step]) -> None:
        views = {rank: list(phase.steps_of(rank, round=round_)) for rank in range(self.schedule.ranks)}
        self._check_match(views)
        steps = [step for rank, view in views.items() for step in view if step.issuer == rank]
        for step, times in Counter(steps).items():
            if times > 1:
                self._fail(f"listed {times} times: {step}")
            self._check_step(phase, step)
        accesses = self._check_races(steps)
        if phase.sync is Sync.LOCK:
            self._check_lock(accesses, touched)
        sent = {step: self._read(step) for step in steps if not step.via.local}
        for step in steps:
            self._write(step, self._read(step) if step.via.local else sent[step])

    def _check_match(self, views: dict[int, list[Step]]) -> None:
        """Both ends of each step list it equally often; messages of a pair in the same order."""
        ends: dict[tuple[int, int], tuple[list[Step], list[Step]]] = defaultdict(lambda: ([], []))
        for rank, view in views.items():
            for step in view:
                if rank == step.source:
                    ends[step.source, step.target][0].append(step)
                if rank == step.target:
                    ends[step.source, step.target][1].append(step)
        for (source, target), (sending, receiving) in ends.items():
            if sending != receiving and (Counter(sending) != Counter(receiving) or sending[0].via is Via.MESSAGE):
                odd = next(iter((Counter(sending) - Counter(receiving)) or (Counter(receiving) - Counter(sending)) or sending))
                self._fail(f"rank {source} and rank {target} do not list the same steps in the same order, such as: {odd}")

    def _check_step(self, phase: Phase, step: Step) -> None:
        if not (0 <= step.start < step.stop <= self.schedule.size):
            self._fail(f"not a range of the {self.schedule.size} elements: {step}")
        if step.source == step.target:
            self._fail(f"a step from a rank to itself: {step}")
        if phase.sync not in _FITTING[step.via]:
            self._fail(f"sync {phase.sync.value!r} does not synchronise this: {step}")
        for group in phase.groups_of(step.source):
            if step.target in group.ranks and group.start <= step.start and step.stop <= group.stop:
                break
        else:
            self._fail(f"no group holds both ranks and the range of: {step}")
        if step.via.local and self.hosts is not None and self.hosts[step.source] != self.hosts[step.target]:
            self._fail(f"{self.hosts[step.source]} and {self.hosts[step.target]} share no memory for: {step}")

    def _check_races(self, steps: list[Step]) -> dict[tuple[int, int], list[_Access]]:
        accesses: dict[tuple[int, int], list[_Access]] = defaultdict(list)
        for step in steps:
            for segment in self._segments(step.start, step.stop):
                accesses[step.source, segment].append(_Access(step=step, writes=False))
                accesses[step.target, segment].append(_Access(step=step, writes=True))
        for (rank, segment), here in accesses.items():
            for one, other in combinations(here, 2):
                if one.races(other):
                    self._fail(
                        f"on rank {rank}, elements {self.cuts[segment]}..{self.cuts[segment + 1]}, a race between: "
                        f"{one.step}; and: {other.step}"
                    )
        return accesses

    def _check_lock(self, accesses: dict[tuple[int, int], list[_Access]], touched: dict[tuple[int, int], Step]) -> None:
        """A put of this round may come while its target is still in an earlier one."""
        for (rank, segment), here in accesses.items():
            for access in here:
                if access.writes and (rank, segment) in touched:
                    self._fail(
                        f"under locks this may come on rank {rank} before an earlier round is done there: {access.step}; "
                        f"the earlier: {touched[rank, segment]}"
                    )
        touched.update({place: here[0].step for place, here in accesses.items()})

    # -- what is where --------------------------------------------------------------------------------------------

    def _segments(self, start: int, stop: int) -> range:
        return range(self.index[start], self.index[stop])

    def _read(self, step: Step) -> list[int]:
        values = []
        for segment in self._segments(step.start, step.stop):
            value = self.has[step.source][segment]
            if value is None:
                self._fail(f"it reads what a native reduce-scatter left undefined: {step}")
            values.append(value)
        return values

    def _write(self, step: Step, values: list[int]) -> None:
        here = self.has[step.target]
        for segment, value in zip(self._segments(step.start, step.stop), values, strict=True):
            if not step.reduce and here[segment] == value:
                span = f"elements {self.cuts[segment]}..{self.cuts[segment + 1]}"
                self._fail(f"rank {step.target} has {span} already, and gets them again: {step}")
            here[segment] = self._joined(here[segment], value, segment, str(step)) if step.reduce else value

    def _joined(self, one: int | None, other: int | None, segment: int, what: str) -> int:
        span = f"elements {self.cuts[segment]}..{self.cuts[segment + 1]}"
        if one is None or other is None:
            self._fail(f"it reads {span}, which a native reduce-scatter left undefined: {what}")
        if one & other:
            self._fail(f"the contribution of {_ranks(one & other)} would be counted twice in {span}: {what}")
        return one | other

    def _native(self, role: Role, group: RankGroup) -> None:
        if group.size == 0:
            return
        what = f"native {role.value} of ranks {group.ranks}"
        for member in range(group.members):
            start, stop = group.part(member)
            for segment in self._segments(start, stop):
                total = self.has[group.ranks[member]][segment]
                if role is not Role.ALL_GATHER:
                    total = 0
                    for rank in group.ranks:
                        total = self._joined(total, self.has[rank][segment], segment, what)
                for rank in group.ranks:
                    undefined = role is Role.REDUCE_SCATTER and rank != group.ranks[member]
                    self.has[rank][segment] = None if undefined else total

    # -- the whole ------------------------------------------------------------------------------------------------

    def _check_groups(self, phase: Phase) -> None:
        owned: dict[int, list[RankGroup]] = defaultdict(list)
        for group in phase.groups:
            if not (0 <= group.start < group.stop <= self.schedule.size):
                self._fail(f"a group with elements {group.start}..{group.stop} of {self.schedule.size}: {group.ranks}")
            if len(set(group.ranks)) != group.members or group.members < 2:
                self._fail(f"a group needs two different ranks or more: {group.ranks}")
            for rank in group.ranks:
                if not 0 <= rank < self.schedule.ranks:
                    self._fail(f"there is no rank {rank} of {self.schedule.ranks}: {group.ranks}")
                for other in owned[rank]:
                    if max(group.start, other.start) < min(group.stop, other.stop):
                        self._fail(f"rank {rank} is in two groups that share elements: {group}; {other}")
                owned[rank].append(group)

    def _check_delivery(self) -> None:
        everyone = (1 << self.schedule.ranks) - 1
        for rank, row in enumerate(self.has):
            for segment, value in enumerate(row):
                span = f"elements {self.cuts[segment]}..{self.cuts[segment + 1]}"
                if value is None:
                    self._fail(f"{span} of rank {rank} are what a native reduce-scatter left undefined")
                if value != everyone:
                    self._fail(f"rank {rank} lacks the contribution of {_ranks(everyone & ~value)} in {span}")

    def _fail(self, violation: str) -> NoReturn:
        raise ScheduleError(f"{self.where}: {violation}")


def _cuts(schedule: Schedule) -> Iterator[int]:
    """Every bound of a step, a group or a part."""
    yield from {0, schedule.size}
    for phase in schedule.phases:
        for group in phase.groups:
            yield from (group.cut(index) for index in range(group.members + 1))
        if isinstance(phase.what, Explicit):
            for steps in phase.what.rounds:
                yield from (bound for step in steps for bound in (step.start, step.stop))


def _ranks(bits: int) -> str:
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:4])}{more}"
