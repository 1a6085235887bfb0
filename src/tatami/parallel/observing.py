"""What the ranks observe while they train, brought together now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tatami.comm.agreement import all_or_none
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError

Aggregate = Callable[[Sequence[Sequence[float]]], float]
"""Of the values of each rank, in the order of the ranks; a rank's are in the order in which it observed them."""


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
        if every < 1:
            raise InputError(f"every must be at least 1, not {every}")
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
            return _means(seen, self._comm)
        return _aggregated(seen, self._comm, aggregate=self._aggregate)


def _means(seen: Sequence[tuple[Mapping[str, float], int]], comm: AbstractCommunicator) -> dict[str, float]:
    """Over all samples; a name counts with those of the observations that have it."""
    told = comm.allgather_object([(name, value, count) for values, count in seen for name, value in values.items()])
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, value, count in (each for rank in told for each in rank if each[2]):
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
