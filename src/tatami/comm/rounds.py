"""One rank's part of a round of messages, carried out on whatever vector is given: post all, wait for all, then add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tatami.collective import Schedule, Step, sums_of
from tatami.comm.base import AbstractCommunicator
from tatami.comm.reduction import HALF_DTYPES, Op, combine
from tatami.errors import ScheduleError


@dataclass(frozen=True, kw_only=True)
class MessageRound:
    """What this rank sends, receives and adds up in one round, as ranges of elements.

    Attributes:
        sends: (to whom, start, stop).
        arrivals: (from whom, start, stop) of what replaces elements of the vector.
        contributions: (from whom, start, stop) of what is added to the vector, and where in the scratch space it arrives.
        sums: (start, stop, where each contribution lies in the scratch space; None for the vector's own), in the order in which
            they are added.
    """

    sends: tuple[tuple[int, int, int], ...]
    arrivals: tuple[tuple[int, int, int], ...]
    contributions: tuple[tuple[int, int, int], ...]
    sums: tuple[tuple[int, int, tuple[int | None, ...]], ...]

    @classmethod
    def of(cls, steps: Iterable[Step], *, rank: int) -> MessageRound:
        """The messages of one round for this rank."""
        listed = list(steps)
        reduced = [step for step in listed if step.target == rank and step.reduce]
        places = dict(
            zip(
                ((step.source, step.start, step.stop) for step in reduced),
                accumulate((step.size for step in reduced), initial=0),
                strict=False,
            )
        )
        return cls(
            sends=tuple((step.target, step.start, step.stop) for step in listed if step.source == rank),
            arrivals=tuple((step.source, step.start, step.stop) for step in listed if step.target == rank and not step.reduce),
            contributions=tuple(
                (step.source, place, place + step.size) for step, place in zip(reduced, places.values(), strict=True)
            ),
            sums=tuple(
                (start, stop, tuple(None if each == rank else places[each, start, stop] for each in ranks))
                for (start, stop), ranks in sums_of(listed, rank=rank).items()
            ),
        )

    @property
    def scratch_size(self) -> int:
        """Elements that arrive to be added."""
        return sum(stop - start for _, start, stop in self.contributions)

    def bound(
        self, vector: torch.Tensor, scratch: torch.Tensor, comm: AbstractCommunicator, *, op: Op = Op.SUM, tag: int = 0
    ) -> Callable[[], None]:
        """The round on `vector` (size,), in place."""
        receives = [(scratch[start:stop], source) for source, start, stop in self.contributions]
        receives += [(vector[start:stop], source) for source, start, stop in self.arrivals]
        sends = [(vector[start:stop], target) for target, start, stop in self.sends]
        sums = [
            (
                vector[start:stop],
                [vector[start:stop] if place is None else scratch[place : place + stop - start] for place in places],
            )
            for start, stop, places in self.sums
        ]

        def act() -> None:
            requests = [comm.irecv(room, source, tag=tag) for room, source in receives]
            requests += [comm.isend(values, target, tag=tag) for values, target in sends]
            for request in requests:
                request.wait()
            for own, contributions in sums:
                add_in_order(own, contributions, op=op)

        return act


def add_in_order(out: torch.Tensor, contributions: Sequence[torch.Tensor], *, op: Op = Op.SUM) -> None:
    """The reduction of `contributions`, from the first to the last, into `out`, which may be one of them; spoils the others.

    Reducing the same contributions in the same order gives the same bits. Those of half precision are summed in float32.
    """
    if out.dtype in HALF_DTYPES:
        sums = contributions[0].float()
        for other in contributions[1:]:
            combine(sums, other, op)
        out.copy_(sums)
        return
    total, last = contributions[0], contributions[-1]
    for other in contributions[1:-1]:
        combine(total, other, op)
    combine(total, last, op, out=out)


class MessageSum:
    """A schedule of messages alone, unrolled once for this rank and run in place on any vector of its size.

    Args:
        comm: the ranks of the schedule.
        schedule: what to carry out.
        tag: of its messages.

    Raises:
        ScheduleError: it has other steps than messages, or is for another number of ranks.
    """

    def __init__(self, comm: AbstractCommunicator, schedule: Schedule, *, tag: int = 0) -> None:
        if schedule.ranks != comm.size:
            raise ScheduleError(f"{schedule.algorithm} is for {schedule.ranks} ranks, the communicator has {comm.size}")
        self._comm = comm
        self._tag = tag
        rounds = [
            MessageRound.of(phase.steps_of(comm.rank, round=number), rank=comm.rank)
            for phase in schedule.phases
            for number in range(phase.num_rounds)
        ]
        if len(rounds) < len(schedule.phases) or schedule.one_sided or schedule.shared:
            raise ScheduleError(f"{schedule.algorithm} is not of messages alone, and cannot run on any vector")
        self._rounds = rounds
        self._scratch: torch.Tensor | None = None

    def run(self, vector: torch.Tensor) -> None:
        """Sum `vector` (size,) over the ranks. Collective.

        Raises:
            CommTimeoutError, RankDiedError: a rank did not come.
        """
        if self._scratch is None or self._scratch.dtype != vector.dtype:
            self._scratch = vector.new_empty(max((each.scratch_size for each in self._rounds), default=0))
        for each in self._rounds:
            each.bound(vector, self._scratch, self._comm, tag=self._tag)()
