"""The one executor of schedules: unrolls one once, for this rank, into a list of actions, and then only runs them.

What a step means is said in `tatami.collective.schedule`; nothing here knows an algorithm. A rank's vector lies where the
schedule needs it: in its host's shared window, in a window for puts, or anywhere. The communicators of a schedule's groups are
made once, together, by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tatami.collective import Native, Phase, RankGroup, Role, Schedule, Step, Sync
from tatami.comm.base import AbstractCommunicator
from tatami.comm.reduction import HALF_DTYPES, Reduction, divide
from tatami.comm.rounds import MessageRound
from tatami.comm.shared_sum import loads_and_stores
from tatami.comm.window import AbstractSharedWindow, AbstractWindow
from tatami.errors import InputError, ScheduleError

Operation = Callable[[], object]
Ranks = tuple[int, ...]


class Executor:
    """Runs schedules on one communicator, on a private copy of it, so that no message of anybody else comes between."""

    def __init__(self, comm: AbstractCommunicator) -> None:
        """Collective."""
        self.comm = comm.duplicate()
        self.groups = GroupCommunicators(self.comm)

    def prepare(self, schedule: Schedule, *, dtype: torch.dtype, reduction: Reduction) -> Program:
        """Make the windows and buffers of a schedule and unroll it for this rank. Collective.

        Args:
            schedule: for as many ranks as the communicator has.
            dtype: of the vector.
            reduction: what `reduce` means; a mean is divided where the schedule says it is cheapest.

        Raises:
            ScheduleError: it is for another number of ranks, or has a rank in two shared windows.
            InputError: it needs windows and the backend has none.
        """
        if schedule.ranks != self.comm.size:
            raise ScheduleError(f"{schedule.algorithm} is for {schedule.ranks} ranks, the communicator has {self.comm.size}")
        check_accumulates(schedule, dtype)
        # Messages, and the puts that have one window for all, need no communicators of their own.
        apart = [each for each in schedule.phases if isinstance(each.what, Native) or each.sync in (Sync.BARRIER, Sync.FENCE)]
        self.groups.make(group.ranks for phase in apart for group in phase.groups)
        return _Unrolling(self, schedule, dtype=dtype, reduction=reduction).program()

    def close(self) -> None:
        """Give the communicators back. Collective; programs must be closed before."""
        self.groups.close()
        self.comm.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A schedule unrolled for this rank.

    Attributes:
        vector: (size,) this rank's contribution before `run`, the result after.
    """

    vector: torch.Tensor
    actions: tuple[Operation, ...]
    windows: tuple[AbstractWindow | AbstractSharedWindow, ...]

    def run(self) -> None:
        for action in self.actions:
            action()

    def close(self) -> None:
        """Collective; `vector` must not be touched any more."""
        for window in reversed(self.windows):
            window.close()


def check_accumulates(schedule: Schedule, dtype: torch.dtype) -> None:
    """Refuse what MPI has no type for.

    Raises:
        InputError: the schedule accumulates bfloat16 or float16.
    """
    accumulates = any(phase.sync.one_sided and phase.role is not Role.ALL_GATHER for phase in schedule.phases)
    if accumulates and dtype in HALF_DTYPES:
        raise InputError(
            f"{schedule.algorithm} sums by accumulate, and MPI does not accumulate {dtype}; let it travel as float32 "
            "(wire=None), or choose torus_put"
        )


class _Unrolling:
    """One schedule, being unrolled."""

    def __init__(self, executor: Executor, schedule: Schedule, *, dtype: torch.dtype, reduction: Reduction) -> None:
        self.comm = executor.comm
        self.rank = executor.comm.rank
        self.groups = executor.groups
        self.schedule = schedule
        self.reduction = reduction
        self.op = reduction.op
        self.windows: list[AbstractWindow | AbstractSharedWindow] = []
        self.shared = self._shared_window(dtype)
        self.by_sync: dict[Sync, AbstractWindow] = {}
        self.fenced: dict[tuple[int, ...], AbstractWindow] = {}
        memory = None if self.shared is None else self.shared[0].tensor
        if memory is None and schedule.shared:
            # Alone on its host: the others make their windows over memory there is, which all must do alike.
            memory = torch.zeros(schedule.size, dtype=dtype, device="cpu")
        for sync in dict.fromkeys(phase.sync for phase in schedule.phases if phase.sync.one_sided):
            window = self.comm.window(schedule.size, dtype, sync=sync, memory=memory)
            self.windows.append(window)
            self.by_sync[sync] = window
            memory = window.tensor
        self.vector = torch.zeros(schedule.size, dtype=dtype, device="cpu") if memory is None else memory
        self.scratch = torch.empty(self._scratch_size(), dtype=dtype, device="cpu")

    def program(self) -> Program:
        actions: list[Operation] = []
        average_before, parts = self.schedule.average_at(self.rank)
        mean = self.reduction is Reduction.MEAN
        for number, phase in enumerate(self.schedule.phases):
            if mean and number == average_before:
                actions.extend(self._average(parts))
            # In a last all-reduce by loads and stores each element is divided before it is stored: no pass of its own.
            divides = mean and average_before == number + 1 and phase.sync is Sync.BARRIER
            actions.extend(self._phase(phase, divides=divides))
            if divides:
                mean = False
        if mean and average_before == len(self.schedule.phases):
            actions.extend(self._average(parts))
        return Program(vector=self.vector, actions=tuple(actions), windows=tuple(self.windows))

    def _average(self, parts: Sequence[tuple[int, int]]) -> list[Operation]:
        views = [self.vector[start:stop] for start, stop in parts]
        ranks = self.schedule.ranks

        def act() -> None:
            for view in views:
                divide(view, ranks)

        return [act]

    def _phase(self, phase: Phase, *, divides: bool) -> list[Operation]:
        if isinstance(phase.what, Native):
            return [self._native(phase.role, group) for group in phase.groups_of(self.rank)]
        if phase.sync.one_sided:
            return self._puts(phase)
        rounds = [list(phase.steps_of(self.rank, round=number)) for number in range(phase.num_rounds)]
        if phase.sync is Sync.BARRIER:
            return self._local(phase, rounds, divides=divides)
        return [self._messages(steps) for steps in rounds if steps]

    # -- messages -------------------------------------------------------------------------------------------------

    def _messages(self, steps: list[Step]) -> Operation:
        """Post all, wait for all, then add."""
        return MessageRound.of(steps, rank=self.rank).bound(self.vector, self.scratch, self.comm, op=self.op)

    # -- natives --------------------------------------------------------------------------------------------------

    def _native(self, role: Role, group: RankGroup) -> Operation:
        comm, op = self.groups.of(group.ranks), self.op
        whole = self.vector[group.start : group.stop]
        if role is Role.ALL_REDUCE:
            return lambda: comm.allreduce(whole, op=op)
        counts = [stop - start for start, stop in map(group.part, range(group.members))]
        start, stop = group.part(comm.rank)
        part = self.vector[start:stop]
        aside = self.scratch[: part.numel()]

        def scatter() -> None:
            comm.reduce_scatter(whole, aside, counts=counts, op=op)
            part.copy_(aside)

        def gather() -> None:
            aside.copy_(part)
            comm.allgather(aside, whole, counts=counts)

        return scatter if role is Role.REDUCE_SCATTER else gather

    # -- puts -----------------------------------------------------------------------------------------------------

    def _puts(self, phase: Phase) -> list[Operation]:
        groups = phase.groups_of(self.rank)
        # Every rank makes the windows of its fenced groups, in the order of the phase.
        windows = {group: self._window_of(phase.sync, group) for group in groups}
        if not groups:
            return []
        # Fences are of a group's own window; posts and locks are by peer, so one epoch serves all groups of a round.
        together = [list(groups)] if phase.sync is Sync.PSCW else [[group] for group in groups]
        actions: list[Operation] = [partial(windows[some[0]].enter, some[0].ranks) for some in together]
        for number in range(phase.num_rounds):
            steps = list(phase.steps_of(self.rank, round=number))
            by_group = [[step for step in steps if _group_of(step, groups) in some] for some in together]
            opens, acts, closes = [], [], []
            for some, mine in zip(together, by_group, strict=True):
                opened, acted, closed = self._put_round(windows[some[0]], some[0].ranks, mine)
                opens.append(opened)
                acts.extend(acted)
                closes.append(closed)
            actions += [*opens, *acts, *closes]
        return actions

    def _window_of(self, sync: Sync, group: RankGroup) -> AbstractWindow:
        if sync is Sync.FENCE and group.members < self.comm.size:
            if group.ranks not in self.fenced:
                part = self.groups.of(group.ranks)
                made = part.window(self.schedule.size, self.vector.dtype, sync=sync, memory=self.vector)
                self.fenced[group.ranks] = made
                self.windows.append(made)
            return self.fenced[group.ranks]
        return self.by_sync[sync]

    def _put_round(
        self, window: AbstractWindow, ranks: Ranks, steps: list[Step]
    ) -> tuple[Operation, list[Operation], Operation]:
        member = {rank: index for index, rank in enumerate(ranks)} if window in self.fenced.values() else None
        sources = sorted({step.source for step in steps if step.target == self.rank})
        targets = sorted({step.target for step in steps if step.source == self.rank})
        acts: list[Operation] = []
        for step in steps:
            if step.source != self.rank:
                continue
            values = self.vector[step.start : step.stop]
            target = step.target if member is None else member[step.target]
            if step.reduce:
                acts.append(partial(window.accumulate, values, target, start=step.start, op=self.op))
            else:
                acts.append(partial(window.put, values, target, start=step.start))
        return (
            partial(window.open, sources=sources, targets=targets),
            acts,
            partial(window.end, sources=sources, targets=targets),
        )

    # -- loads and stores -------------------------------------------------------------------------------------------

    def _shared_window(self, dtype: torch.dtype) -> tuple[AbstractSharedWindow, tuple[int, ...]] | None:
        """The shared window of this rank's host, and the ranks in it."""
        mine = {
            group.ranks for phase in self.schedule.phases if phase.sync is Sync.BARRIER for group in phase.groups_of(self.rank)
        }
        if not mine:
            return None
        if len(mine) > 1:
            raise ScheduleError(f"rank {self.rank} is in {len(mine)} shared windows, of {sorted(mine)[:3]}; it can be in one")
        ranks = mine.pop()
        window = self.groups.of(ranks).shared_window(self.schedule.size, dtype)
        self.windows.append(window)
        return window, ranks

    def _local(self, phase: Phase, rounds: list[list[Step]], *, divides: bool) -> list[Operation]:
        if self.shared is None or self.rank not in phase.memberships:
            return []
        window, ranks = self.shared
        vectors = {rank: window.of(member) for member, rank in enumerate(ranks)}
        actions: list[Operation] = [window.barrier]
        for steps in rounds:
            mine = [step for step in steps if step.issuer == self.rank]
            divisor = self.schedule.ranks if divides else None
            actions += loads_and_stores(mine, vectors, rank=self.rank, op=self.op, divisor=divisor)
            actions.append(window.barrier)
        return actions

    def _scratch_size(self) -> int:
        natives = [
            stop - start
            for phase in self.schedule.phases
            if isinstance(phase.what, Native)
            for group in phase.groups_of(self.rank)
            for start, stop in [group.part(group.ranks.index(self.rank))]
        ]
        return max([self.schedule.scratch_size(self.rank), *natives])


def _group_of(step: Step, groups: Sequence[RankGroup]) -> RankGroup:
    """The group that holds both ends and the range of a step."""
    return next(
        group
        for group in groups
        if step.source in group.ranks and step.target in group.ranks and group.start <= step.start and step.stop <= group.stop
    )


class GroupCommunicators:
    """Parts of a communicator, by their ranks. All ranks must ask for the same groups in the same order."""

    def __init__(self, comm: AbstractCommunicator) -> None:
        self._comm = comm
        self._everyone = tuple(range(comm.size))
        self._parts: dict[Ranks, AbstractCommunicator | None] = {}

    def make(self, groups: Iterable[Ranks]) -> None:
        """Make those that are not there yet; disjoint ones by one split. Collective."""
        wanted = dict.fromkeys(ranks for ranks in groups if ranks not in self._parts and ranks != self._everyone)
        for layer in _layers(list(wanted)):
            mine = next((index for index, ranks in enumerate(layer) if self._comm.rank in ranks), None)
            key = layer[mine].index(self._comm.rank) if mine is not None else 0
            part = self._comm.split(mine, key=key)
            for index, ranks in enumerate(layer):
                self._parts[ranks] = part if index == mine else None

    def of(self, ranks: Ranks) -> AbstractCommunicator:
        """The communicator of a group that this rank is in; member i of the group is its rank i.

        Raises:
            ScheduleError: this rank is not in the group.
        """
        part = self._comm if ranks == self._everyone else self._parts[ranks]
        if part is None:
            raise ScheduleError(f"rank {self._comm.rank} is not in the group {ranks}")
        return part

    def close(self) -> None:
        """Give them back. Collective."""
        for part in self._parts.values():
            if part is not None:
                part.close()
        self._parts.clear()


def _layers(groups: Sequence[Ranks]) -> list[list[Ranks]]:
    """Groups put together so that no two of a layer share a rank."""
    layers: list[tuple[list[Ranks], set[int]]] = []
    for ranks in groups:
        for layer, taken in layers:
            if taken.isdisjoint(ranks):
                layer.append(ranks)
                taken.update(ranks)
                break
        else:
            layers.append(([ranks], set(ranks)))
    return [layer for layer, _ in layers]
