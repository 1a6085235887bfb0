"""A schedule carried out on a stage: every rank goes through its phases on its own, and waits for whom it must.

A message begins when both ends have come to its round (rendezvous, as libraries send long ones), a put when its synchronisation
lets it: under FENCE and BARRIER all ranks meet (`Meeting`) before the first round and after each; under PSCW the target
posts with an empty message, and the completion travels with the data; under LOCK the source's flush is an empty answer, and an
empty notice follows it. What one rank sends another in a round is one transfer. Loads and stores of a rank are transfers over
the link of its host, one after the other.

Rounds that are alike (`Phase.distinct_rounds`) are simulated until they repeat themselves (`settling`).
`part_of` says what one rank sends and receives in a round, and what it reads and writes in its host's memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tatami.cluster import Processor
from tatami.collective import Native, Phase, Schedule, Sync
from tatami.errors import ScheduleError
from tatami.sim.allreduce.settling import CHECKS, Settling
from tatami.sim.allreduce.software import Software
from tatami.sim.stage import Stage, Then

_EMPTY_BYTES = 1
PhaseRound = tuple[int, int]
"""Phase and round."""
Key = tuple[PhaseRound, int, int]
"""Phase and round, source, target."""


class Replay:
    """One run of `schedule`; ranks `enter` it when they come to it.

    Args:
        stage: where.
        schedule: without native phases: see `expand`.
        hosts: of each rank, its index on the platform.
        element_bytes: 4 for float32.
        software: what ranks add to the wires.
        done: called with each rank that has everything.
        processors: of each rank, for what messages cost it; none: nothing.
        skip: whether rounds that repeat themselves are left out; only where nothing else goes on on the stage.

    Raises:
        ScheduleError: a native phase.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        *,
        hosts: Sequence[int],
        element_bytes: int,
        software: Software,
        done: Callable[[int], None],
        skip: bool = True,
        processors: Sequence[Processor] = (),
    ) -> None:
        for phase in schedule.phases:
            if isinstance(phase.what, Native):
                raise ScheduleError(f"{schedule.algorithm}: {phase.title} must be expanded before it can be replayed")
        self._stage = stage
        self._schedule = schedule
        self._hosts = hosts
        self._element_bytes = element_bytes
        self._software = software
        self._done = done
        self._processors = processors
        self._began_s: dict[int, float] = {}
        self._place: dict[int, PhaseRound] = {}
        self._part: dict[int, RankTransfers] = {}
        self._waits: dict[int, int] = {}
        self._ready: dict[Key, int] = defaultdict(int)
        self._early: set[Key] = set()
        self._next_s: dict[int, float] = {}
        self._connections: dict[tuple[int, int], float] = {}
        self._meetings: dict[tuple[int, int, int], Meeting] = {}
        # By identity: hashing a group of 10,000 ranks at every barrier would cost.
        self._number_of_group = {id(group): number for phase in schedule.phases for number, group in enumerate(phase.groups)}
        self._settling = [self._settling_of(phase) if skip else None for phase in schedule.phases]
        self._ahead_s = 0.0
        self.payload_bytes = 0.0
        self.phase_ends_s = [math.nan] * len(schedule.phases)

    @property
    def now_s(self) -> float:
        """The stage's time, and that of what was left out."""
        return self._stage.now_s + self._ahead_s

    def enter(self, rank: int) -> None:
        """`rank` begins."""
        self._phase(rank, 0)

    # -- phases ---------------------------------------------------------------------------------------------------

    def _phase(self, rank: int, index: int) -> None:
        while index < len(self._schedule.phases) and rank not in self._schedule.phases[index].memberships:
            index += 1
        if index == len(self._schedule.phases):
            self._done(rank)
            return
        if self._schedule.phases[index].sync in (Sync.FENCE, Sync.BARRIER, Sync.LOCK):
            self._meet(rank, index, epoch=0, then=lambda: self._round(rank, index, 0))
        else:
            self._round(rank, index, 0)

    def _leave(self, rank: int, index: int) -> None:
        self.phase_ends_s[index] = self.now_s
        self._phase(rank, index + 1)

    def _meet(self, rank: int, index: int, *, epoch: int, then: Then) -> None:
        """Meet in all of the rank's groups, one after the other."""
        memberships = self._schedule.phases[index].memberships[rank]

        def next_group(number: int) -> None:
            if number == len(memberships):
                then()
                return
            group, member = memberships[number]
            key = (index, epoch, self._number_of_group[id(group)])
            if key not in self._meetings:
                self._meetings[key] = Meeting(self._stage, [self._hosts[each] for each in group.ranks])
            self._meetings[key].enter(member, lambda: next_group(number + 1))

        next_group(0)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _round(self, rank: int, index: int, round_: int) -> None:
        phase = self._schedule.phases[index]
        meets = phase.sync in (Sync.FENCE, Sync.BARRIER)
        while round_ < phase.num_rounds:
            part = part_of(phase, rank=rank, round=round_, element_bytes=self._element_bytes)
            if meets or not part.empty:
                break
            round_ += 1
        else:
            self._leave(rank, index)
            return
        # A rank's round ends when its sends, its receives and its local accesses have. `_waits` counts them down. A source may
        # run ahead of its target: rank 0 puts its part of round 3 while rank 1 is in round 2. Such arrivals are kept in
        # `_early`, and are taken off the count when the target comes to that round.
        place = (index, round_)
        self._place[rank], self._part[rank] = place, part
        self._began_s[rank] = self.now_s
        arrived = [source for source in part.receives if (place, source, rank) in self._early]
        self._early.difference_update((place, source, rank) for source in arrived)
        self._waits[rank] = len(part.sends) + len(part.receives) - len(arrived) + bool(part.local) + 1
        self._post(rank, place, part, phase.sync)
        if part.local:
            self._access(rank, part, 0)
        self._one_less(rank)  # the round itself: so that it does not end while it is being started

    def _post(self, rank: int, place: PhaseRound, part: RankTransfers, sync: Sync) -> None:
        cost_s = self._software.put_s if sync.one_sided else self._software.message_s
        if self._processors:
            cost_s += self._processors[rank].message_s
        now_s, gap_s = self.now_s, self._software.gap_s
        begin_s = max(0.0, self._next_s.get(rank, now_s) - now_s) if gap_s else 0.0
        for target, size_bytes in part.sends.items():
            delay_s = begin_s + cost_s
            key = (place, rank, target)
            self._stage.soon(delay_s, lambda key=key, size_bytes=size_bytes: self._is_ready(key, size_bytes, sync))  # type: ignore[misc]
            begin_s += max(cost_s, gap_s)
            self._next_s[rank] = now_s + begin_s
        for source, size_bytes in part.receives.items():
            key = (place, source, rank)
            if sync is Sync.ARRIVAL:
                self._is_ready(key, size_bytes, sync)
            elif sync is Sync.PSCW:
                self._tell(rank, source, lambda key=key, size_bytes=size_bytes: self._is_ready(key, size_bytes, sync))  # type: ignore[misc]

    def _is_ready(self, key: Key, size_bytes: int, sync: Sync) -> None:
        """One of those that a transfer waits for has come: its source, its target, or the target's post."""
        self._ready[key] += 1
        if self._ready[key] < (2 if sync in (Sync.ARRIVAL, Sync.PSCW) else 1):
            return
        del self._ready[key]
        _, source, target = key
        self.payload_bytes += size_bytes
        arrived = self._locked(key) if sync is Sync.LOCK else lambda: self._has_arrived(key)
        self._stage.soon(self._held_up_s(source, target, size_bytes), lambda: self._begin(source, target, size_bytes, arrived))

    def _begin(self, source: int, target: int, size_bytes: int, arrived: Then) -> None:
        beyond_s = self._software.beyond_s(size_bytes) if self._software.pieces else 0.0
        then = arrived if beyond_s == 0 else lambda: self._stage.soon(beyond_s, arrived)
        self._stage.send(self._hosts[source], self._hosts[target], size_bytes=size_bytes, then=then)

    def _held_up_s(self, source: int, target: int, size_bytes: int) -> float:
        """Until the connection of these two ranks takes a message of this way."""
        if not self._software.pieces:
            return 0.0
        opposite_s = self._connections.get((target, source), -math.inf) + self._software.stagger_s(size_bytes)
        held_up_s = max(0.0, opposite_s - self.now_s)
        self._connections[source, target] = self.now_s + held_up_s
        return held_up_s

    def _locked(self, key: Key) -> Then:
        """After a put under a lock: its flush, and the notice."""
        _, source, target = key

        def flushed() -> None:
            self._one_less(source)
            self._tell(source, target, lambda: self._has_come(key))

        return lambda: self._tell(target, source, flushed)

    def _has_arrived(self, key: Key) -> None:
        self._one_less(key[1])
        self._has_come(key)

    def _has_come(self, key: Key) -> None:
        place, source, target = key
        if self._place.get(target) == place and source in self._part[target].receives:
            self._one_less(target)
        else:
            self._early.add(key)

    def _access(self, rank: int, part: RankTransfers, number: int) -> None:
        """Loads and stores, from number `number` on."""
        if number == len(part.local):
            self._one_less(rank)
            return
        source, target, size_bytes = part.local[number]
        self.payload_bytes += size_bytes
        self._stage.send(
            self._hosts[source], self._hosts[target], size_bytes=size_bytes, then=lambda: self._access(rank, part, number + 1)
        )

    def _one_less(self, rank: int) -> None:
        self._waits[rank] -= 1
        if self._waits[rank] == 0:
            index, round_ = self._place[rank]
            after_s = self._part[rank].sum_bytes / self._software.sum_bytes_per_s + self._handling_s(rank)
            self._stage.soon(after_s, lambda: self._close(rank, index, round_))

    def _handling_s(self, rank: int) -> float:
        """What the messages of a round still cost a rank that has them all: receiving, and copying that was not done yet."""
        if not self._processors:
            return 0.0
        own, part = self._processors[rank], self._part[rank]
        copying_s = (sum(part.sends.values()) + sum(part.receives.values())) / own.copy_bytes_per_s
        copied_s = self._began_s[rank] + len(part.sends) * own.message_s + copying_s
        return len(part.receives) * own.message_s + max(0.0, copied_s - self.now_s)

    def _close(self, rank: int, index: int, round_: int) -> None:
        del self._place[rank]
        if self._schedule.phases[index].sync in (Sync.FENCE, Sync.BARRIER):
            self._meet(rank, index, epoch=round_ + 1, then=lambda: self._round(rank, index, round_ + 1))
            return
        settling = self._settling[index]
        if settling is None or not settling.note(rank, round_, self.now_s):
            self._round(rank, index, round_ + 1)
        elif settling.complete(round_):
            self._look(index, round_, settling)

    def _tell(self, source: int, target: int, then: Then) -> None:
        self._stage.send(self._hosts[source], self._hosts[target], size_bytes=_EMPTY_BYTES, then=then)

    # -- rounds that are alike ------------------------------------------------------------------------------------

    def _settling_of(self, phase: Phase) -> Settling | None:
        if not repeats_itself(phase, ranks=self._schedule.ranks):
            return None
        return Settling(ranks=self._schedule.ranks, rounds=phase.num_rounds)

    def _look(self, index: int, round_: int, settling: Settling) -> None:
        """All wait after this round: let them go on with the leads they had, or leave out the rest of the phase."""
        ends = settling.ends(round_)
        waited_s = self.now_s - min(ends.values())
        period_s = settling.period_s(round_)
        left = self._schedule.phases[index].num_rounds - 1 - round_
        begin_s = self._stage.now_s
        lead_s = {rank: end_s - min(ends.values()) for rank, end_s in ends.items()}
        self._ahead_s -= waited_s
        if period_s is None:
            for rank in ends:
                self._stage.at(begin_s + lead_s[rank], lambda rank=rank: self._round(rank, index, round_ + 1))  # type: ignore[misc]
            return
        self._ahead_s += left * period_s
        self.payload_bytes += left * sum(self._sent_in(index, rank) for rank in ends)
        for rank in ends:
            self._stage.at(begin_s + lead_s[rank], lambda rank=rank: self._leave(rank, index))  # type: ignore[misc]

    def _sent_in(self, index: int, rank: int) -> int:
        """Bytes that a rank sends in each round of a phase whose rounds are alike; to an element."""
        part = part_of(self._schedule.phases[index], rank=rank, round=0, element_bytes=self._element_bytes)
        return sum(part.sends.values())


class Meeting:
    """One barrier of the ranks on `hosts`; in round t member i tells member i + 2^t (Hensgen, Finkel, Manber 1988)."""

    def __init__(self, stage: Stage, hosts: Sequence[int]) -> None:
        self._stage = stage
        self._hosts = hosts
        self._num_rounds = (len(hosts) - 1).bit_length()
        self._heard: list[set[int]] = [set() for _ in hosts]
        self._at: list[int | None] = [None] * len(hosts)
        self._then: dict[int, Then] = {}

    def enter(self, member: int, then: Then) -> None:
        """`member` is there; `then` when it knows that all are."""
        self._then[member] = then
        self._go_on(member, 0)

    def _go_on(self, member: int, round_: int) -> None:
        while True:
            self._at[member] = round_
            if round_ == self._num_rounds:
                self._then.pop(member)()
                return
            self._tell((member + (1 << round_)) % len(self._hosts), member, round_)
            if round_ not in self._heard[member]:
                return
            round_ += 1

    def _tell(self, target: int, member: int, round_: int) -> None:
        def heard() -> None:
            self._heard[target].add(round_)
            if self._at[target] == round_:
                self._go_on(target, round_ + 1)

        self._stage.send(self._hosts[member], self._hosts[target], size_bytes=_EMPTY_BYTES, then=heard)


@dataclass(frozen=True, kw_only=True)
class RankTransfers:
    """Bytes by peer; all that goes from one rank to another in a round is one transfer.

    Attributes:
        sum_bytes: of what arrives and must be added, also by accumulate: a processor does it.
        local: (from, to, bytes) of loads and stores, one after the other.
    """

    sends: dict[int, int]
    receives: dict[int, int]
    sum_bytes: int
    local: tuple[tuple[int, int, int], ...]

    @property
    def empty(self) -> bool:
        return not (self.sends or self.receives or self.local)


def repeats_itself(phase: Phase, *, ranks: int) -> bool:
    """Whether only the first rounds of a phase must be simulated: all are equal, and all of `ranks` ranks are in them."""
    equal = phase.sync is Sync.ARRIVAL and phase.num_rounds > CHECKS[0] and len(list(phase.distinct_rounds())) == 1
    # With fewer elements than ranks some have nothing to do in some rounds, and pass them by.
    thin = any(group.size < group.members for group in phase.groups)
    return equal and not thin and len(phase.memberships) == ranks


def num_transfers(schedule: Schedule) -> int:
    """About how many transfers a replay of `schedule` simulates, if each rank of a phase has as many as its first."""
    total = 0
    for phase in schedule.phases:
        most = CHECKS[1] if repeats_itself(phase, ranks=schedule.ranks) else phase.num_rounds
        for round_, count in phase.distinct_rounds():
            part = part_of(phase, rank=next(iter(phase.memberships)), round=round_, element_bytes=1)
            total += min(count, most) * (len(part.sends) + len(part.local)) * len(phase.memberships)
    return total


def part_of(phase: Phase, *, rank: int, round: int, element_bytes: int) -> RankTransfers:
    """What `rank` does in a round of a phase that is not native."""
    sends: dict[int, int] = defaultdict(int)
    receives: dict[int, int] = defaultdict(int)
    local: dict[tuple[int, int, bool], int] = defaultdict(int)
    summed = 0
    for step in phase.steps_of(rank, round=round):
        size_bytes = step.size * element_bytes
        if step.via.local:
            if step.issuer == rank:
                local[step.source, step.target, step.reduce] += size_bytes
        elif step.source == rank:
            sends[step.target] += size_bytes
        else:
            receives[step.source] += size_bytes
            summed += size_bytes if step.reduce else 0
    return RankTransfers(
        sends=dict(sends),
        receives=dict(receives),
        sum_bytes=summed,
        local=tuple((source, target, size_bytes) for (source, target, _), size_bytes in local.items()),
    )
