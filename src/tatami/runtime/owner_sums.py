"""Gradients of a tiled model, summed over the owners of each unit; what all ranks of a replica have rides on the same messages.

Replicas tell each other two things in the same sum: which parameters had a part in the loss, because a parameter without one
has no gradient, which to an optimizer is not the same as one of 0 (where the forward pass depends on the samples, it has part
if it had on any rank); and the number of samples of the global batch that each was given, in digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tatami.gradients.base import AbstractGradientSums
from tatami.runtime.placement import Placement
from tatami.runtime.rows import Rows
from tatami.runtime.same_batch import different_sizes
from tatami.runtime.stopwatch import LinkTimes
from tatami.runtime.vector_sum import wire_dtype
from tatami.tiling.traffic import num_digits, size_digits, sizes_of


class OwnerSums(AbstractGradientSums):
    """Gradient sums over the owners of each unit of one model.

    Args:
        rows: of every block, the tensors that hold its units here.
        wire: as what gradients travel.
        link_times: records when messages between replicas leave and arrive.
        placement: the current placement of the model.
        replicas: the ranks of each replica now.
        replica: the number of this rank's; None where it has no tile.
    """

    def __init__(
        self,
        *,
        rows: Sequence[Sequence[Rows]],
        wire: str | None,
        link_times: LinkTimes,
        placement: Callable[[], Placement],
        replicas: Callable[[], list[list[int]]],
        replica: Callable[[], int | None],
    ) -> None:
        self._rows, self._wire, self._link_times = rows, wire, link_times
        self._placement, self._replicas, self._replica = placement, replicas, replica
        self._cut = {id(each.tensor) for block in rows for each in block}

    @property
    def layout(self) -> Placement:
        return self._placement()

    @property
    def are_needed(self) -> bool:
        return self._placement().exchange is not None

    @property
    def shares_units(self) -> bool:
        return any(len(replica) > 1 for replica in self._replicas())

    @property
    def sends_evenly(self) -> bool:
        """Whether all ranks sum equal parts of the gradients."""
        exchange = self._placement().exchange
        return exchange is not None and exchange.rates is None

    @property
    def wire(self) -> torch.dtype | None:
        """As what gradients travel; None: as they are."""
        return wire_dtype(self._wire)

    def finish(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, weight: float, samples: int
    ) -> list[torch.Tensor | None]:
        placement = self._placement()
        assert placement.exchange is not None
        has = [grad for grad in gradients if grad is not None]
        if weight != 1.0 and has:
            torch._foreach_mul_(has, weight)
        own = [torch.zeros_like(each) if grad is None else grad for each, grad in zip(parameters, gradients, strict=True)]
        count = num_digits(self._wire)
        digits = [[0] * count for _ in placement.tilings[0].replicas]
        if (replica := self._replica()) is not None:
            digits[replica] = size_digits(samples, count=count)
        facts = [*(float(grad is not None) for grad in gradients), *(float(digit) for each in digits for digit in each)]
        riding = torch.tensor(facts, dtype=torch.float32, device="cpu")
        riding = riding.to(parameters[0].device) if parameters else riding  # a stage may have no weights
        by_parameter = dict(zip(map(id, parameters), own, strict=True))
        pairs = [
            [Rows(by_parameter[id(each.tensor)], each.runs) for each in block if id(each.tensor) in by_parameter]
            for block in self._rows
        ]
        replicated = [(number, grad) for number, grad in enumerate(own) if id(parameters[number]) not in self._cut]
        *sums, riding = placement.exchange.sum(pairs, [*(grad for _, grad in replicated), riding], times=self._link_times)
        for (number, _), total in zip(replicated, sums, strict=True):
            own[number] = total
        found = riding.tolist()
        used, sizes = found[: len(own)], sizes_of(found[len(own) :], count=count)
        if len(set(sizes)) > 1:
            raise different_sizes(sizes, replicas=self._replicas())
        return [total if part else None for total, part in zip(own, used, strict=True)]
