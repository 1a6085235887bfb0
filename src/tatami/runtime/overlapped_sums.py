"""Data parallelism: gradients are summed in buckets, between hosts while the backward pass still computes.

A long sum over a slow link hides behind the backward pass if each part of it leaves as soon as it is ready. Where every rank is
a replica, gradients therefore travel in the buckets of `DataParallel` (`tatami.gradients.bucketed_sums`). Ranks of one host
add up in each other's memory, which costs them less than messages, also where there is little to add. In all other cases
gradients travel after the pass (`tatami.runtime.owner_sums`): where ranks share units, over links of different rates, over
which the parts are uneven, and while a re-tiler measures when the messages of each link arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.gradients.base import AbstractGradientSums
from tatami.gradients.bucketed_sums import BucketedSums
from tatami.gradients.buckets import size_bytes_of, usual_bucket_bytes
from tatami.runtime.owner_sums import OwnerSums
from tatami.runtime.same_batch import different_sizes
from tatami.runtime.stopwatch import LinkTimes
from tatami.tiling.overlap import LEAST_BYTES


class OverlappedSums(AbstractGradientSums):
    """Sums the gradients of one model, in buckets where that pays.

    A backward pass that is broken off after buckets have left cannot be repeated: the next forward pass raises `TrainingError`.

    Args:
        owners: sums the gradients where buckets are not used.
        comm: the ranks.
        link_times: records when messages between replicas leave and arrive, while a re-tiler measures links.
        replicas: the ranks of each replica now.
    """

    def __init__(
        self, owners: OwnerSums, comm: AbstractCommunicator, *, link_times: LinkTimes, replicas: Callable[[], list[list[int]]]
    ) -> None:
        self._owners, self._comm, self._link_times, self._replicas = owners, comm, link_times, replicas
        self._buckets: BucketedSums | None = None
        self._flat_layout: object = None  # the last layout in which every rank was a replica of its own

    @property
    def layout(self) -> object:
        return self._owners.layout

    @property
    def are_needed(self) -> bool:
        return self._owners.are_needed

    @property
    def shares_units(self) -> bool:
        return self._owners.shares_units

    @property
    def takes_early(self) -> bool:
        return self._buckets is not None and self._buckets.takes_early

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        if not self._pays(parameters):
            self.close()
            return
        if self._buckets is None:
            if len(set(self._comm.hosts)) > 1 and size_bytes_of(parameters) < LEAST_BYTES:
                return
            size_bytes = usual_bucket_bytes(self._comm, parameters)
            self._buckets = BucketedSums(self._comm, bucket_bytes=size_bytes, wire=self._owners.wire, has_numbers=True)
        self._buckets.begin(parameters)

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor, weight: float, *, is_whole: bool) -> None:
        if self._buckets is not None:
            self._buckets.put(parameter, gradient, weight, is_whole=is_whole)

    def finish(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, weight: float, samples: int
    ) -> list[torch.Tensor | None]:
        if self._buckets is None:
            return self._owners.finish(parameters, gradients, weight=weight, samples=samples)
        sums = self._buckets.finish(parameters, gradients, weight=weight, samples=samples)
        replicas = self._replicas()
        sizes = [self._buckets.samples_of_ranks[rank] for (rank,) in replicas]
        if len(set(sizes)) > 1:
            raise different_sizes(sizes, replicas=replicas)
        return sums

    def close(self) -> None:
        """Give the memory of the buckets back. Collective."""
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None

    def _pays(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether buckets are used; the same on all ranks."""
        if self.layout is not self._flat_layout:
            replicas = self._replicas()
            is_flat = self.are_needed and len(replicas) == self._comm.size and all(len(ranks) == 1 for ranks in replicas)
            self._flat_layout = self.layout if is_flat else None
        return (
            self._flat_layout is not None
            and self._owners.sends_evenly
            and not self._link_times.is_watched
            and {each.dtype for each in parameters} <= {torch.float32, torch.float64}
        )


def may_overlap(comm: AbstractCommunicator) -> bool:
    """Whether these ranks can sum in buckets: in host memory, always the same ranks, on several hosts or in shared memory."""
    return not (comm.changes or comm.on_devices) and (len(set(comm.hosts)) > 1 or comm.has_windows)
