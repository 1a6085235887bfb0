"""One rank's part of a round of messages, carried out on whatever vector is given: post all, wait for all, then add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tatami.collective import Schedule, Step, sums_of
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.reduction import HALF_DTYPES, Op, combine
from tatami.errors import ScheduleError

_TAGS = 1024
"""From the tag of one piece of a vector to that of the next."""


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
        receives: (memory, from whom).
        sends: (values, to whom).
        sums: (memory, what is added up there), when all has arrived.
        op: how it is added up.
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
    """Schedules of messages alone, unrolled once for this rank and run in place on any vector of their size.

    One schedule for each piece of the vector, one after the other. All pieces are under way at once: while the sums of one go
    back to all ranks, the parts of the next still come together, so that links have no gap between the rounds of a piece.

    Args:
        schedules: what to carry out, for each piece.
        tag: of the messages of the first piece.

    Raises:
        ScheduleError: one has other steps than messages, or is for another number of ranks.
    """

    def __init__(self, comm: AbstractCommunicator, *schedules: Schedule, tag: int = 0) -> None:
        self._comm = comm
        self._pieces: list[tuple[slice, tuple[MessageRound, ...], int]] = []
        stop = 0
        for number, schedule in enumerate(schedules):
            start, stop = stop, stop + schedule.size
            self._pieces.append((slice(start, stop), self._rounds_of(schedule), tag + number * _TAGS))
        self._scratch: list[torch.Tensor] = []

    def _rounds_of(self, schedule: Schedule) -> tuple[MessageRound, ...]:
        if schedule.ranks != self._comm.size:
            raise ScheduleError(f"{schedule.algorithm} is for {schedule.ranks} ranks, the communicator has {self._comm.size}")
        rounds = [
            MessageRound.of(phase.steps_of(self._comm.rank, round=number), rank=self._comm.rank)
            for phase in schedule.phases
            for number in range(phase.num_rounds)
        ]
        if len(rounds) < len(schedule.phases) or schedule.one_sided or schedule.shared:
            raise ScheduleError(f"{schedule.algorithm} is not of messages alone, and cannot run on any vector")
        return tuple(rounds)

    def run(self, vector: torch.Tensor) -> None:
        """Sum `vector` (size,) over the ranks. Collective.

        Raises:
            CommTimeoutError, RankDiedError: a rank did not come.
        """
        self.begin(vector).wait()

    def begin(self, vector: torch.Tensor) -> SumRequest:
        """As `run`, without waiting; one vector at a time. `test` and `wait` of what is returned begin the next rounds."""
        if not self._scratch or self._scratch[0].dtype != vector.dtype:
            sizes = [max((each.scratch_size for each in rounds), default=0) for _, rounds, _ in self._pieces]
            self._scratch = [vector.new_empty(size) for size in sizes]
        return SumRequest(
            [
                _PieceRequest(self._bound(rounds, vector[where], scratch, tag=tag))
                for (where, rounds, tag), scratch in zip(self._pieces, self._scratch, strict=True)
            ]
        )

    def _bound(
        self, rounds: Iterable[MessageRound], piece: torch.Tensor, scratch: torch.Tensor, *, tag: int
    ) -> Iterator[BoundRound]:
        return (each.bound(piece, scratch, self._comm, tag=tag) for each in rounds)


class SumRequest(AbstractRequest):
    """A sum under way."""

    def __init__(self, pieces: Sequence[_PieceRequest]) -> None:
        self.pieces = pieces

    def test(self) -> bool:
        done = [each.test() for each in self.pieces]  # all of them go on
        return all(done)

    def wait(self) -> None:
        wait_together([self])


class _PieceRequest(AbstractRequest):
    """The sum of one piece under way: each round begins when the one before is over."""

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
            self.wait_for_round()

    def wait_for_round(self) -> bool:
        """Wait for the messages of this round, and begin the next one; whether none is left."""
        while self._requests:
            self._requests.pop().wait()
        return self.test()

    def _next(self) -> None:
        self._round = next(self._rounds, None)
        self._requests = [] if self._round is None else self._round.begin()


def wait_together(requests: Iterable[AbstractRequest]) -> None:
    """Wait for all of them, for the rounds of sums in turn: the next round of each begins while others still have messages.

    To wait for one after the other would leave links idle. Four MiB over four hosts on 250 Mbit/s take 239 ms in one piece and
    210 in two; the bytes alone take 201 (benchmarks/sums.py).

    Raises:
        CommTimeoutError, RankDiedError: a rank did not come.
    """
    sums: list[_PieceRequest] = []
    for request in requests:
        if isinstance(request, SumRequest):
            sums += request.pieces
        else:
            request.wait()
    while sums:
        sums = [each for each in sums if not each.wait_for_round()]
