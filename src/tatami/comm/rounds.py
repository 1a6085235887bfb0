"""One rank's part of a round of messages, carried out on whatever vector is given: post all, wait for all, then add."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tatami.collective import Schedule, Step, sums_of
from tatami.comm.base import AbstractCommunicator, AbstractRequest
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
    ) -> BoundRound:
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
        return BoundRound(comm, receives, sends, sums, op=op, tag=tag)


class BoundRound:
    """A round on the memory of one vector.

    Args:
        comm: the ranks.
        receives: (memory, from whom).
        sends: (values, to whom).
        sums: (memory, what is added up there), when all has arrived.
        op: how it is added up.
        tag: of the messages.
    """

    def __init__(
        self,
        comm: AbstractCommunicator,
        receives: Sequence[tuple[torch.Tensor, int]],
        sends: Sequence[tuple[torch.Tensor, int]],
        sums: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
        *,
        op: Op,
        tag: int,
    ) -> None:
        self._comm, self._receives, self._sends, self._sums, self._op, self._tag = comm, receives, sends, sums, op, tag

    def __call__(self) -> None:
        for request in self.begin():
            request.wait()
        self.finish()

    def begin(self) -> list[AbstractRequest]:
        """Post the messages."""
        requests = [self._comm.irecv(room, source, tag=self._tag) for room, source in self._receives]
        return requests + [self._comm.isend(values, target, tag=self._tag) for values, target in self._sends]

    def finish(self) -> None:
        """Add up; the messages have arrived."""
        for own, contributions in self._sums:
            add_in_order(own, contributions, op=self._op)


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
        self.begin(vector).wait()

    def begin(self, vector: torch.Tensor) -> AbstractRequest:
        """As `run`, without waiting; one vector at a time. `test` and `wait` of what is returned begin the next rounds."""
        if self._scratch is None or self._scratch.dtype != vector.dtype:
            self._scratch = vector.new_empty(max((each.scratch_size for each in self._rounds), default=0))
        return _SumRequest(each.bound(vector, self._scratch, self._comm, tag=self._tag) for each in self._rounds)


class _SumRequest(AbstractRequest):
    """A sum under way: each round begins when the one before is over."""

    def __init__(self, rounds: Iterable[BoundRound]) -> None:
        self._rounds = iter(rounds)
        self._next()

    def test(self) -> bool:
        while self._round is not None:
            # One test makes the backend look for all messages, so that the others wait for their turn.
            while self._requests and self._requests[-1].test():
                self._requests.pop()
            if self._requests:
                return False
            self._round.finish()
            self._next()
        return True

    def wait(self) -> None:
        while not self.test():
            self._requests.pop().wait()

    def _next(self) -> None:
        self._round = next(self._rounds, None)
        self._requests = [] if self._round is None else self._round.begin()
