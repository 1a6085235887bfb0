"""Sums of whole vectors over the ranks of a communicator, as the description of an iteration says (`tatami.tiling.traffic`)."""

from __future__ import annotations

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.comm.reduction import HALF_DTYPES
from tatami.comm.rounds import MessageSum
from tatami.comm.staging import from_host, is_on_host, to_host
from tatami.comm.transport import Transport
from tatami.tiling.traffic import sum_algorithm, sum_schedules

_TAG = 9
_KEPT = 64
"""So many sizes are kept unrolled: a network has a few, batches of changing sizes have more."""


def wire_dtype(wire: str | None) -> torch.dtype | None:
    """One of `tatami.workload.WIRES` as torch names it."""
    return None if wire is None else {"bfloat16": torch.bfloat16, "float16": torch.float16}[wire]


class VectorSum:
    """Sums tensors over all ranks of one communicator; the same bits on every rank.

    Args:
        comm: the ranks.
        wire: to what elements are rounded on their way, this rank's own, too; None: they travel as they are. What the library
            sums (`tatami.tiling.traffic.sum_wire`) stays as it is.
        byte_s: seconds that a byte takes over the slowest link, as far as it is known; the same on all ranks. Over slow ones
            vectors go in pieces, which cost messages.
    """

    def __init__(self, comm: AbstractCommunicator, *, wire: str | None = None, byte_s: float = 0.0) -> None:
        self._comm, self._byte_s = comm, byte_s
        self._wire = wire_dtype(wire)
        self._native = sum_algorithm(comm.hosts) == "native"
        self._sums: dict[tuple[int, torch.dtype], MessageSum] = {}

    def sum_(self, tensor: torch.Tensor, *, exact: bool = False) -> None:
        """Sum `tensor`, of any shape, over the ranks, in place. Collective. Half precision travels, and is summed, in float32.

        Args:
            tensor: what this rank has.
            exact: whatever the wire is, it travels as it is.

        Raises:
            CommTimeoutError, RankDiedError: a rank did not come.
        """
        if self._native:
            self._comm.allreduce(tensor)
            return
        values = tensor.detach()
        if not is_on_host(values):
            # Once here and back, where the messages of the sum would each go their own way. NCCL sums where they lie.
            if self._comm.transport is Transport.NCCL:
                self._comm.allreduce(tensor)
                return
            copied = to_host(values)
            self.sum_(copied, exact=exact)
            from_host(copied, values)
            return
        dtype = torch.float32 if values.dtype in HALF_DTYPES else values.dtype
        if self._wire is not None and not exact:
            dtype = self._wire
        if values.is_contiguous() and values.dtype is dtype:
            self._run(values.view(-1))
            return
        copied = values.to(dtype, copy=True).reshape(-1)
        self._run(copied)
        values.copy_(copied.view(values.shape))

    def _run(self, vector: torch.Tensor) -> None:
        key = vector.numel(), vector.dtype
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) == _KEPT:
                self._sums.clear()
            hosts, bytes_ = self._comm.hosts, vector.element_size()
            schedules = sum_schedules(hosts, size=vector.numel(), element_bytes=bytes_, byte_s=self._byte_s)
            found = self._sums[key] = MessageSum(self._comm, *schedules, tag=_TAG)
        found.run(vector)
