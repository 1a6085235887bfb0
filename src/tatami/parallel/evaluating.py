"""Evaluation on many ranks: means weighed by the samples that each rank had, and results gathered batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from tatami.comm.agreement import all_or_none
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.inputs import check_at_least

Batch = TypeVar("Batch")
Local = TypeVar("Local")
Result = TypeVar("Result")

BATCHES_A_ROUND = 8
"""How many results a rank gathers before it sends them."""
FAILED = "the evaluation failed"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank measured.

    Attributes:
        values: means over the samples of this rank, by name.
        num_samples: that they are over; 0 where the rank had none, and then `values` are not looked at.
    """

    values: Mapping[str, float]
    num_samples: int


def weighted_means(measured: Measured, comm: AbstractCommunicator) -> dict[str, float]:
    """The means over the samples of all ranks, the same on every rank. Collective.

    A name that only some ranks have is averaged over the samples of those. What no rank with samples has is left out.

    Raises:
        InputError: on all ranks, a number of samples below 0, or a value that is not a number; says on which rank.
    """
    measured_by_rank = comm.allgather_object((dict(measured.values), measured.num_samples))
    for rank, (values, num_samples) in enumerate(measured_by_rank):
        if num_samples < 0:
            raise InputError(f"rank {rank} measured {num_samples} samples; give 0 or more")
        for name, value in values.items() if num_samples else ():
            if not isinstance(value, int | float):
                raise InputError(f"rank {rank} measured {name} as a {type(value).__name__}; give a number, as by .item()")
    return _means(measured_by_rank)


class MultiNodeEvaluator:
    """Makes a rank's own evaluation one of all ranks.

        evaluate = MultiNodeEvaluator(lambda: Measured(values={"accuracy": accuracy(model, mine)}, num_samples=len(mine)), comm)
        means = evaluate()                              # the same on every rank

    Args:
        evaluate: what this rank measures on its own samples.
        comm: the ranks.
    """

    def __init__(self, evaluate: Callable[[], Measured], comm: AbstractCommunicator) -> None:
        self._evaluate, self._comm = evaluate, comm

    def __call__(self) -> dict[str, float]:
        """See `weighted_means`. Collective.

        Raises:
            TrainingError: on all ranks, if the evaluation of one failed; says which, and how.
        """
        measured = all_or_none(self._comm, self._evaluate, what=FAILED)
        return weighted_means(measured, self._comm)


def gather_evaluation(
    batches: Iterable[Batch],
    comm: AbstractCommunicator,
    *,
    local: Callable[[Batch], Local],
    aggregate: Callable[[list[Local]], Result],
) -> Result:
    """`aggregate` of what `local` made of every batch of every rank, the same on every rank. Collective.

    For metrics that are not means: `aggregate` runs on rank 0, with the results in turn: the first batch of each rank, in the
    order of the ranks, then the second of each that has one, and so on. Ranks may have different numbers of batches, or none.

    Args:
        batches: of this rank.
        comm: the ranks.
        local: of one batch; what it returns travels as an object.
        aggregate: of all.

    Raises:
        TrainingError: on all ranks, if `local`, `aggregate` or the batches of one failed; says which, and how.
    """
    mine = iter(batches)
    everything: list[list[Local]] = [[] for _ in range(comm.size)]
    while True:
        part = all_or_none(comm, lambda: [local(batch) for batch in islice(mine, BATCHES_A_ROUND)], what=FAILED)
        gathered = comm.gather_object(part)
        for results, new in zip(everything, gathered or (), strict=False):
            results += new
        if not any(comm.allgather_object(len(part) == BATCHES_A_ROUND)):
            break
    longest = max(map(len, everything))
    in_turn = [results[index] for index in range(longest) for results in everything if index < len(results)]
    result = all_or_none(comm, lambda: aggregate(in_turn) if comm.rank == 0 else None, what="aggregate failed")
    answer: Result = comm.bcast_object(result)
    return answer


Aggregate = Callable[[Sequence[Sequence[float]]], float]
"""A function of each rank's values, by rank; those of a rank are in the order in which it observed them."""


class ObservationAggregator:
    """Collects values, and makes one of them over all ranks at every `every`-th observation.

        observations = ObservationAggregator(comm, every=10)
        seen = observations.observe({"loss": loss.item()}, num_samples=len(y))
        if seen is not None:
            print(seen["loss"])                        # the mean over the samples of 10 steps of all ranks

    Args:
        comm: the ranks, which observe equally often.
        every: observations between two exchanges.
        aggregate: of the values of one name, instead of their mean over samples.
    """

    def __init__(self, comm: AbstractCommunicator, *, every: int = 1, aggregate: Aggregate | None = None) -> None:
        check_at_least(1, every=every)
        self._comm, self._every, self._aggregate = comm, every, aggregate
        self._seen: list[tuple[Mapping[str, float], int]] = []

    def observe(self, values: Mapping[str, float], *, num_samples: int = 1) -> dict[str, float] | None:
        """Take `values`; returns the aggregated ones, the same on every rank, when they are due. Collective then.

        Args:
            values: by name; a rank may have names of its own.
            num_samples: of this rank, that they are means over.

        Raises:
            TrainingError: on all ranks, if `aggregate` failed.
        """
        self._seen.append((dict(values), num_samples))
        if len(self._seen) < self._every:
            return None
        seen, self._seen = self._seen, []
        if self._aggregate is None:
            return _means(each for rank in self._comm.allgather_object(seen) for each in rank)
        return _aggregated(seen, self._comm, aggregate=self._aggregate)


def _means(seen: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Over all samples; a name counts with those of the observations that have it."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, value, count in ((*each, count) for values, count in seen if count for each in values.items()):
        sums[name] = sums.get(name, 0.0) + value * count
        counts[name] = counts.get(name, 0) + count
    return {name: sums[name] / counts[name] for name in sorted(sums)}


def _aggregated(
    seen: Sequence[tuple[Mapping[str, float], int]], comm: AbstractCommunicator, *, aggregate: Aggregate
) -> dict[str, float]:
    told: list[Any] = comm.allgather_object([values for values, _ in seen])
    names = sorted({name for rank in told for values in rank for name in values})

    def all_names() -> dict[str, float]:
        return {name: aggregate([[values[name] for values in rank if name in values] for rank in told]) for name in names}

    return all_or_none(comm, all_names, what="aggregate failed")
