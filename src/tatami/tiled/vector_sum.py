"""Sums of whole vectors over the ranks of a communicator, as the description of an iteration says (`tatami.tiling.traffic`)."""

from __future__ import annotations

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.comm.reduction import HALF_DTYPES
from tatami.comm.rounds import MessageSum
from tatami.tiling.traffic import sum_algorithm, sum_schedule

_TAG = 9
_KEPT = 64
"""So many sizes are kept unrolled: a network has a few, batches of changing sizes have more."""


class VectorSum:
    """Sums tensors over all ranks of one communicator; the same bits on every rank.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: AbstractCommunicator) -> None:
        self._comm = comm
        self._native = sum_algorithm(comm.hosts) == "native"
        self._sums: dict[tuple[int, torch.dtype], MessageSum] = {}

    def sum_(self, tensor: torch.Tensor) -> None:
        """Sum `tensor`, of any shape, over the ranks, in place. Collective. Half precision travels, and is summed, in float32.

        Raises:
            CommTimeoutError, RankDiedError: a rank did not come.
        """
        if self._native:
            self._comm.allreduce(tensor)
            return
        values = tensor.detach()
        if values.is_contiguous() and values.dtype not in HALF_DTYPES:
            self._run(values.view(-1))
            return
        copied = values.to(torch.float32 if values.dtype in HALF_DTYPES else values.dtype, copy=True).reshape(-1)
        self._run(copied)
        values.copy_(copied.view(values.shape))

    def _run(self, vector: torch.Tensor) -> None:
        key = vector.numel(), vector.dtype
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) == _KEPT:
                self._sums.clear()
            schedule = sum_schedule(self._comm.hosts, size=vector.numel(), element_bytes=vector.element_size())
            found = self._sums[key] = MessageSum(self._comm, schedule, tag=_TAG)
        found.run(vector)
