"""An order of samples that all ranks agree on, of which each takes all or its share: a sampler for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any, Literal, get_args

import torch
from torch.utils.data import Sampler

from tatami.comm.agreement import same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.parallel.scattering import share_of

Share = Literal["all", "equal", "exact"]


class SynchronizedSampler(Sampler[int]):
    """Indices of samples; a new epoch begins with each iteration that was carried to its end. Sends nothing while it runs.

    Attributes:
        epoch: that the next index is of.
    """

    def __init__(
        self,
        data_source: Sized,
        comm: AbstractCommunicator,
        *,
        share: Share = "all",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """Collective.

        Args:
            data_source: the same on all ranks.
            comm: the ranks.
            share: `all`: every rank has all samples, in the same order. `equal`: each its part, all of the same length, so that
                a few samples are on two ranks. `exact`: each its part, no sample twice, some parts one longer.
            shuffle: draw a new order for every epoch.
            seed: of the order, that of rank 0.

        Raises:
            InputError: data of different lengths; a share that there is not.
        """
        if share not in get_args(Share):
            raise InputError(f"there is no share {share!r}; choose of {', '.join(get_args(Share))}")
        facts = {"data_source of length": len(data_source), "share": share, "shuffle": shuffle}
        same_everywhere(comm, facts, where="SynchronizedSampler")
        self._num_samples, self._share, self._shuffle = len(data_source), share, shuffle
        self._seed: int = comm.bcast_object(seed)
        self._rank, self._ranks = comm.rank, comm.size
        self.epoch = 0
        self._position = 0

    def __len__(self) -> int:
        """Indices of a whole epoch on this rank."""
        return self._num_samples if self._share == "all" else len(self._span())

    def __iter__(self) -> Iterator[int]:
        indices = self._indices()
        while self._position < len(indices):
            self._position += 1
            yield indices[self._position - 1]
        self.epoch += 1
        self._position = 0

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """Where it is.

        Args:
            position: samples of this epoch that are used up; None: those that were drawn. Workers of a DataLoader draw ahead,
                so with them it must be given.
        """
        return {"epoch": self.epoch, "position": self._position if position is None else position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the rest of that epoch is what the next iteration yields."""
        self.epoch, self._position, self._seed = state["epoch"], state["position"], state["seed"]

    def _span(self) -> range:
        return share_of(self._num_samples, rank=self._rank, ranks=self._ranks, equal=self._share == "equal")

    def _indices(self) -> Sequence[int]:
        order: Sequence[int] = range(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._num_samples, generator=generator).tolist()
        return order if self._share == "all" else [order[index] for index in self._span()]
