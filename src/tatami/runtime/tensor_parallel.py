"""Tensor-parallel communication: between the ranks of a replica, which share samples and split units.

Two operations, each the other's derivative (Shoeybi et al. 2019, arXiv 1909.08053, call them g and f):

    sum_over_replica     forward: sum of the partial products    backward: nothing to do, every rank has the whole gradient
    copy_to_replica      forward: nothing to do                  backward: sum of the partial input gradients
"""

from __future__ import annotations

from typing import Any

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.gradients.passes import refuse_create_graph
from tatami.runtime.phases import IterationPhase, Phases
from tatami.runtime.recomputing import recompute_before_backward, recompute_now
from tatami.runtime.vector_sum import VectorSum


class ReplicaComm:
    """What the tiled layers of a rank know about their replica: how to sum over it, and the stopwatch.

    Attributes:
        comm: the ranks of the replica; None where the rank is alone in it, or has no tile.
        is_silent: whether the pass that runs is over no samples, and the replica has nothing to sum; the same on all its ranks.
    """

    def __init__(self, phases: Phases, *, wire: str | None = None) -> None:
        self.comm: AbstractCommunicator | None = None
        self.is_silent = False
        self._silent: ReplicaComm | None = None
        self._wire = wire
        self.phases = phases
        self._sum: VectorSum | None = None

    @classmethod
    def alone(cls) -> ReplicaComm:
        """A replica of one rank, which sums nothing."""
        return cls(Phases())

    def meet(self, comm: AbstractCommunicator | None, *, byte_s: float = 0.0) -> None:
        """From now on the replica is the ranks of `comm`; takes it over, and closes the one before.

        Args:
            comm: None where this rank is alone in it.
            byte_s: seconds that a byte takes over its slowest link.
        """
        if self.comm is not None:
            self.comm.close()
        self.comm, self.is_silent, self._silent = comm, False, None
        if comm is not None:
            self._silent = ReplicaComm(self.phases)
            self._silent.comm = comm
        self._sum = None if comm is None else VectorSum(comm, wire=self._wire, byte_s=byte_s)

    @property
    def now(self) -> ReplicaComm:
        """What the pass that runs sums by, to its end: another pass may come before this one goes back."""
        return self._silent if self.is_silent and self._silent is not None else self

    def sum_(self, tensor: torch.Tensor, *, exact: bool = False) -> None:
        """Sum `tensor` over the replica, in place; what is `exact` is not rounded on its way."""
        if self._sum is None:
            return
        with self.phases.during(IterationPhase.TENSOR_PARALLEL):
            self._sum.sum_(tensor, exact=exact)


class _SumOverReplica(torch.autograd.Function):
    # With a `setup_context`, torch would look up the signature of `forward` in every call: some 0.1 ms of a core.
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, replica: ReplicaComm) -> torch.Tensor:
        # The partial product is ours alone (fresh from a matrix product that does not keep it): sum it where it lies.
        ctx.mark_dirty(partial)
        ctx.set_materialize_grads(False)
        recompute_before_backward(ctx, partial)
        replica.now.sum_(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        recompute_now(ctx)
        return grad, None


class _CopyToReplica(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, replica: ReplicaComm) -> torch.Tensor:
        ctx.replica = replica.now
        ctx.set_materialize_grads(False)
        recompute_before_backward(ctx, x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        refuse_create_graph()
        recompute_now(ctx)
        if grad is None:
            return None, None
        whole = grad.clone(memory_format=torch.contiguous_format)
        ctx.replica.sum_(whole)
        return whole, None


def sum_over_replica(partial: torch.Tensor, replica: ReplicaComm) -> torch.Tensor:
    """The sum over the replica of all ranks' partial product (samples_here, ..., outputs), in place."""
    if replica.comm is None:
        return partial
    summed: torch.Tensor = _SumOverReplica.apply(partial, replica)  # type: ignore[no-untyped-call]
    return summed


def copy_to_replica(x: torch.Tensor, replica: ReplicaComm) -> torch.Tensor:
    """`x` (samples_here, ..., inputs), the same on all ranks of the replica, whose gradient is summed over the replica."""
    if replica.comm is None or not x.requires_grad:
        return x
    copied: torch.Tensor = _CopyToReplica.apply(x, replica)  # type: ignore[no-untyped-call]
    return copied
