"""Gradients of replicas of one rank: summed in buckets that leave while the backward pass still computes.

In the first passes all ranks find out in which order gradients become ready. From then on buckets follow the order of rank 0,
and each leaves when its last gradient is there. What comes in several parts (from a checkpoint with reentrant autograd) leaves
at the end of the pass. On one host so do all, if they are few and small: their bytes cost less than a call for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tatami.comm.agreement import debugging
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, TrainingError
from tatami.gradients.base import AbstractGradientSums
from tatami.gradients.buckets import BucketSet, size_bytes_of
from tatami.tiling.overlap import LEAST_BYTES

_LEARNS = 2
"""Passes in which the order of gradients is learnt, and nothing leaves before the end."""


class BucketedSums(AbstractGradientSums):
    """Sums over all ranks of a communicator, each of which has all units.

    Args:
        comm: the ranks.
        bucket_bytes: the largest size of a bucket of several parameters.
        wire: the dtype in which gradients travel; None: their own.
        algorithm: see `tatami.comm.overlap`.
        has_numbers: the number of samples of every rank travels with the gradients.
        is_stale: a pass delivers the sums of the one before, and its own while the next one computes.
        check: looks through the gradients of this rank in debug mode. Collective.
        learns: gradients are `put` while the backward pass computes, so that their order is worth learning.

    Attributes:
        samples_of_ranks: of the pass whose sums were delivered last, where `has_numbers`.
    """

    layout = None
    are_needed = True
    shares_units = False

    def __init__(
        self,
        comm: AbstractCommunicator,
        *,
        bucket_bytes: int,
        wire: torch.dtype | None = None,
        algorithm: str | None = None,
        has_numbers: bool = False,
        is_stale: bool = False,
        check: Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor | None]], None] | None = None,
        learns: bool = True,
    ) -> None:
        self._comm, self._bucket_bytes, self._wire, self._algorithm = comm, bucket_bytes, wire, algorithm
        self._has_numbers, self._is_stale, self._check = has_numbers, is_stale, check
        self._parameters: list[nn.Parameter] = []
        self._index_of: dict[nn.Parameter, int] = {}
        self._sets: list[BucketSet] = []
        self._under_way: BucketSet | None = None
        self._num_passes = 0
        self.samples_of_ranks: list[int] = []
        self._arrived: dict[int, None] = {}
        self._order: list[int] = []
        self._late = set[int]()
        self._learns = _LEARNS if learns else 0
        self._are_small = False

    @property
    def takes_early(self) -> bool:
        return not self._are_small

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._sets and self._current.has_begun:
            raise TrainingError(
                f"the last backward pass on rank {self._comm.rank} was broken off, and the ranks no longer agree; end the run"
            )
        if not self._sets or not self._index_of.keys() >= set(parameters):
            self._lay(parameters)

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor, weight: float, *, is_whole: bool) -> None:
        index = self._index_of.get(parameter)
        if index is None or self._are_small:
            return
        if self._learns:
            if not is_whole:
                self._late.add(index)
            self._arrived.setdefault(index)
            return
        if index in self._late or not weight or debugging():
            return
        if not is_whole:
            raise TrainingError(
                "a gradient came twice in one backward pass, the first time not whole, as it did not in the first passes. "
                "Checkpoint with use_reentrant=False"
            )
        self._current.put(index, gradient, scale=weight)

    def finish(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, weight: float, samples: int
    ) -> list[torch.Tensor | None]:
        if debugging() and self._check is not None:
            self._check(parameters, gradients)
        current = self._current
        numbers = [self._index_of[parameter] for parameter in parameters]
        current.put_rest(
            {index: each for index, each in zip(numbers, gradients, strict=True) if each is not None}, scale=weight
        )
        current.begin_rest(samples)
        self._num_passes += 1
        due: BucketSet | None = current
        if self._is_stale:
            due, self._under_way = self._under_way, current
        sums = self._taken(due, parameters, gradients)
        self.samples_of_ranks = [] if due is None else due.numbers()
        if self._learns and not self._are_small:
            self._learn()
        return sums

    def flush(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """The sums of the last pass, where they are one pass late. Collective."""
        if self._under_way is None:
            return []
        due, self._under_way = self._under_way, None
        sums = self._taken(due, self._parameters, [None] * len(self._parameters))
        return list(zip(self._parameters, sums, strict=True))

    def close(self) -> None:
        """Give the memory back. Collective."""
        for each in self._sets:
            each.close()

    def _taken(
        self, due: BucketSet | None, parameters: Sequence[nn.Parameter], rooms: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        if due is None:
            return [None] * len(parameters)
        due.wait()
        return due.take([self._index_of[parameter] for parameter in parameters], into=rooms, like=parameters)

    def _learn(self) -> None:
        if len(self._arrived) > len(self._order):
            self._order = list(self._arrived)
        self._arrived.clear()
        self._learns -= 1
        if self._learns or self._comm.size == 1:
            return
        # Buckets are summed element by element, so that all ranks must cut them in the same way: in the order of one of them.
        # What is late on any rank goes to the end: a bucket leaves when its last gradient is there, and one that is whole only
        # when the pass is over would keep all others of its bucket until then.
        orders, late = zip(*self._comm.allgather_object((self._order, self._late)), strict=True)
        self._late = set().union(*late)
        rest = [index for index in reversed(range(len(self._parameters))) if index not in set(orders[0])]
        found = [*(index for index in orders[0] if index not in self._late), *(i for i in rest if i not in self._late)]
        if self._under_way is None:
            self._lay(self._parameters, order=[*found, *sorted(self._late)])

    def _lay(self, parameters: Sequence[nn.Parameter], *, order: Sequence[int] | None = None) -> None:
        """Buckets for `parameters` and all that were there before."""
        if self._under_way is not None:
            raise InputError(
                "a parameter is trained that was frozen before, while gradients of the last step are still on their way: call "
                "flush() before you thaw it"
            )
        known = [*self._parameters, *(each for each in parameters if each not in self._index_of)]
        self.close()
        self._parameters = known
        self._are_small = len(set(self._comm.hosts)) == 1 and size_bytes_of(known) < min(LEAST_BYTES, self._bucket_bytes)
        self._index_of = {parameter: index for index, parameter in enumerate(known)}
        self._sets = [
            BucketSet(
                self._comm,
                known,
                order=order,
                bucket_bytes=self._bucket_bytes,
                wire=self._wire,
                algorithm=self._algorithm,
                has_numbers=self._has_numbers,
            )
            # Where sums are delivered a pass late, one set is on its way while the next pass fills the other.
            for _ in range(2 if self._is_stale else 1)
        ]

    @property
    def _current(self) -> BucketSet:
        return self._sets[self._num_passes % len(self._sets)]
