"""A schedule carried out on plain arrays: the reference that executors are tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from tatami.collective.schedule import Phase, Schedule
from tatami.collective.step import Role, Step, Via, sums_of
from tatami.errors import ScheduleError

Vector = npt.NDArray[Any]
Operator = Callable[[Vector, Vector], Vector]
"""Elementwise: (what the target has, what comes) -> what the target has then."""


def simulate(schedule: Schedule, vectors: Sequence[npt.ArrayLike], *, op: Operator = np.add) -> list[Vector]:
    """Every rank's vector after the schedule, step by step as an executor runs it; `vectors` are left as they are.

    Args:
        schedule: what to carry out.
        vectors: one for each rank, (size,) each. Integers are summed exactly.
        op: the reduction, elementwise; numpy's add, maximum, minimum ...

    Raises:
        ScheduleError: the number of vectors or the length of one does not fit the schedule.
    """
    state = [np.array(vector) for vector in vectors]
    if len(state) != schedule.ranks:
        raise ScheduleError(f"{schedule.algorithm} is for {schedule.ranks} ranks, and {len(state)} vectors were given")
    for rank, vector in enumerate(state):
        if vector.shape != (schedule.size,):
            raise ScheduleError(
                f"{schedule.algorithm} is over {schedule.size} elements, rank {rank}'s vector is {vector.shape}"
            )
    for phase in schedule.phases:
        run_phase(phase, state, op=op)
    return state


def run_phase(phase: Phase, state: list[Vector], *, op: Operator = np.add) -> None:
    """One phase, in place."""
    if phase.num_rounds == 0:
        for group in phase.groups:
            _run_native(group.ranks, [group.part(member) for member in range(group.members)], phase.role, state, op)
    for round_ in range(phase.num_rounds):
        views = {rank: list(phase.steps_of(rank, round=round_)) for rank in sorted(phase.memberships)}
        # Messages and puts carry the values from the beginning of the round, whatever arrives meanwhile: in a ring of two,
        # rank 0 sends its first half while rank 1's half is added to another part of its vector. Loads and stores see the
        # present values. What several ranks send to the same elements is summed together, in the order of `sums_of`, as ranks
        # do.
        sent = {
            step: state[step.source][step.start : step.stop].copy()
            for view in views.values()
            for step in view
            if not step.via.local
        }
        for rank, view in views.items():
            for (start, stop), ranks in sums_of(view, rank=rank).items():
                came = {step.source: sent[step] for step in view if (step.target, step.start, step.stop) == (rank, start, stop)}
                came[rank] = state[rank][start:stop]
                state[rank][start:stop] = reduce(op, [came[each] for each in ranks])
            for step in view:
                if step.reduce and step.via is Via.MESSAGE:
                    continue
                if step.via.local and step.issuer == rank:
                    _apply(step, state[step.source][step.start : step.stop], state, op)
                elif not step.via.local and step.target == rank:
                    _apply(step, sent[step], state, op)


def _apply(step: Step, values: Vector, state: list[Vector], op: Operator) -> None:
    here = state[step.target][step.start : step.stop]
    here[:] = op(here, values) if step.reduce else values


def _run_native(ranks: tuple[int, ...], parts: list[tuple[int, int]], role: Role, state: list[Vector], op: Operator) -> None:
    """What a native collective means; its reduce-scatter leaves other parts alone, on which no caller may rely."""
    for member, (start, stop) in enumerate(parts):
        total = state[ranks[member]][start:stop].copy()
        if role is not Role.ALL_GATHER:
            total = state[ranks[0]][start:stop].copy()
            for rank in ranks[1:]:
                total = op(total, state[rank][start:stop])
        for rank in ranks if role is not Role.REDUCE_SCATTER else (ranks[member],):
            state[rank][start:stop] = total
