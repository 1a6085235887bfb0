"""An order of samples that all ranks agree on, of which each takes all or its share: a sampler for torch's DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Literal, get_args

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tatami.cluster import Cluster
from tatami.comm.agreement import same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, NotGivenError
from tatami.inputs import check_seed
from tatami.parallel.scattering import share_of
from tatami.parallel.speed_shares import SpeedShares
from tatami.random_state import torch_state
from tatami.tiling import Span

Share = Literal["all", "equal", "exact"]


class SynchronizedSampler(Sampler[int]):
    """Indices of samples; an iteration that was broken off goes on with the next one. Sends nothing while it runs.

    A DataLoader with workers draws ahead of the loop: `ResumableLoader` knows where the loop is.
    """

    def __init__(
        self,
        data_source: Sized,
        comm: AbstractCommunicator,
        *,
        share: Share = "all",
        shuffle: bool = True,
        seed: int = 0,
        speeds: Cluster | Sequence[float] | None = None,
        global_batch: int | None = None,
    ) -> None:
        """Collective.

        With `speeds` every rank's batches are as large as it is fast, and all ranks have equally many:

            sampler = SynchronizedSampler(dataset, comm, share="exact", speeds=[1, 1, 0.5], global_batch=160)
            loader = DataLoader(dataset, batch_size=sampler.batch_size, sampler=sampler)        # 64, 64 and 32 samples

        Args:
            data_source: the same on all ranks.
            comm: the ranks.
            share: `all`: every rank has all samples, in the same order. `equal`: each its part, all of the same length, so that
                a few samples are on two ranks. `exact`: each its part, no sample twice, some parts one longer.
            shuffle: draw a new order for every epoch.
            seed: of the order, that of rank 0.
            speeds: of the ranks, in their order, for `share="exact"`; only ratios count. `DataParallel` weighs unequal batches,
                so that the mean over the global batch is exact.
            global_batch: the samples of all ranks in one batch, with `speeds`. What is left at the end of an epoch, of fewer
                samples than ranks, is left out.

        Raises:
            InputError: data of different lengths; a share that there is not, or such a seed; speeds without a global batch, or
                not one for each rank; a rank too slow for a sample of each batch.
        """
        if share not in get_args(Share):
            raise InputError(f"there is no share {share!r}; choose one of {', '.join(get_args(Share))}")
        facts: dict[str, Any] = {"data_source of length": len(data_source), "share": share, "shuffle": shuffle}
        self._speed_shares = _speed_shares(speeds, global_batch, share, comm)
        if self._speed_shares is not None:
            facts |= {"speeds": self._speed_shares.speeds, "global_batch": global_batch}
        same_everywhere(comm, facts, where="SynchronizedSampler")
        self._global_batch = global_batch
        self._num_samples, self._share, self._shuffle = len(data_source), share, shuffle
        self._seed = check_seed(comm.bcast_object(seed))
        self._rank, self._ranks = comm.rank, comm.size
        self._epoch = 0
        self._position = 0
        self._drawn_ahead = False

    @property
    def epoch(self) -> int:
        """Epoch of the next index."""
        return self._epoch + self._is_drawn

    @property
    def batch_size(self) -> int:
        """With `speeds`: the samples of this rank in every batch but the last; for the DataLoader.

        Raises:
            NotGivenError: made without `speeds`.
        """
        if self._speed_shares is None or self._global_batch is None:
            raise NotGivenError("SynchronizedSampler: batch_size is known where speeds= and global_batch= are given")
        return self._speed_shares.span(self._global_batch).size

    def __len__(self) -> int:
        """Indices of a whole epoch on this rank."""
        if self._speed_shares is not None:
            return sum(span.size for _, span in self._batches(self._speed_shares))
        return self._num_samples if self._share == "all" else len(self._span())

    def __iter__(self) -> Iterator[int]:
        """
        Raises:
            InputError: a DataLoader with workers had drawn ahead when the iteration before this one was broken off.
        """
        if self._drawn_ahead and not self._is_drawn:
            raise InputError(
                f"SynchronizedSampler on rank {self._rank}: an iteration was broken off of which workers had drawn "
                f"{self._position} of {len(self)} samples, and what the loop has not got of them would be left out. Iterate "
                "over ResumableLoader(loader), or say where to go on by load_state_dict"
            )
        self._epoch, self._position = self.epoch, 0 if self._is_drawn else self._position
        self._drawn_ahead = _is_drawn_by_workers()
        indices = self._indices()
        if not indices:
            self._epoch += 1
        while self._position < len(indices):
            self._position += 1
            yield indices[self._position - 1]

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """Where it is.

        Args:
            position: samples of this epoch that are used up; None: those that were drawn.

        Raises:
            InputError: workers of a DataLoader draw ahead, so that `position` must be given; it is out of range.
        """
        if position is None:
            if self._drawn_ahead:
                raise InputError(
                    f"SynchronizedSampler on rank {self._rank}: a DataLoader with workers draws samples ahead of the loop, so "
                    "that the sampler does not know where the loop is. Iterate over ResumableLoader(loader) and save its "
                    "state_dict(), or give position=, the samples of this rank that are used up in this epoch"
                )
            position = self._position
        if not 0 <= position <= len(self):
            raise InputError(
                f"SynchronizedSampler: position={position} is not between 0 and {len(self)}, the samples of an epoch"
            )
        is_over = 0 < position == len(self)
        return {"epoch": self._epoch + is_over, "position": 0 if is_over else position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the rest of that epoch is what the next iteration yields."""
        self._epoch, self._position, self._seed = state["epoch"], state["position"], state["seed"]
        self._drawn_ahead = False

    @property
    def _is_drawn(self) -> bool:
        """Whether all indices of the epoch were."""
        return 0 < self._position == len(self)

    def _span(self) -> range:
        return share_of(self._num_samples, rank=self._rank, ranks=self._ranks, equal=self._share == "equal")

    def _indices(self) -> Sequence[int]:
        order: Sequence[int] = range(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed((self._seed + self._epoch) % 2**64)
            order = torch.randperm(self._num_samples, generator=generator, dtype=torch.int64, device="cpu").tolist()
        if self._speed_shares is not None:
            batches = self._batches(self._speed_shares)
            return [order[start + index] for start, span in batches for index in range(span.start, span.stop)]
        return order if self._share == "all" else [order[index] for index in self._span()]

    def _batches(self, shares: SpeedShares) -> Iterator[tuple[int, Span]]:
        """Where each global batch begins in the order, and which of its samples are this rank's."""
        assert self._global_batch is not None
        whole = shares.span(self._global_batch)
        for start in range(0, self._num_samples, self._global_batch):
            left = self._num_samples - start
            if left >= self._global_batch:
                yield start, whole
            elif (last := shares.span_of_rest(left, of=self._global_batch)) is not None:
                yield start, last


def _speed_shares(
    speeds: Cluster | Sequence[float] | None, global_batch: int | None, share: Share, comm: AbstractCommunicator
) -> SpeedShares | None:
    if (speeds is None) != (global_batch is None):
        raise InputError("SynchronizedSampler: speeds= and global_batch= go together, since a batch is what is shared out")
    if speeds is None or global_batch is None:
        return None
    if share != "exact":
        raise InputError(f"SynchronizedSampler: speeds= is for share='exact', not {share!r}: parts of unequal speeds differ")
    if global_batch < 1:
        raise InputError(f"SynchronizedSampler: global_batch must be at least 1, not {global_batch}")
    shares = SpeedShares(speeds, comm, where="SynchronizedSampler")
    shares.sizes(global_batch)
    return shares


def _is_drawn_by_workers() -> bool:
    """Whether a DataLoader with workers asks for the next index. It does not say so: it is among the callers."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(frame.f_locals.get("self"), _MultiProcessingDataLoaderIter):
            return True
    return False


class ResumableLoader:
    """The batches of `loader`, and where the loop over them is.

        loader = ResumableLoader(DataLoader(dataset, batch_size=32, sampler=SynchronizedSampler(dataset, comm), num_workers=4))
        loader.load_state_dict(state)           # to go on where another run was
        for x, y in loader:
            ...
            state = loader.state_dict()         # this batch counts as used

    A DataLoader with workers draws some batches ahead of the loop, so that its sampler does not know where the loop is. An
    iteration that is broken off goes on with the next one, with the first batch that the loop has not got.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """
        Args:
            loader: draws by a `SynchronizedSampler`, in batches of a fixed size.

        Raises:
            InputError: another sampler; a batch sampler that does not say its `batch_size`.
        """
        batches: Any = loader.batch_sampler
        sampler = loader.sampler if batches is None else getattr(batches, "sampler", loader.sampler)
        if not isinstance(sampler, SynchronizedSampler):
            raise InputError(
                f"ResumableLoader: the DataLoader draws by a {type(sampler).__name__}; give it "
                "sampler=SynchronizedSampler(...), whose order can be drawn again"
            )
        self._batch_size: int | None = 1 if batches is None else getattr(batches, "batch_size", None)
        if self._batch_size is None:
            raise InputError(
                f"ResumableLoader: {type(batches).__name__} has no batch_size, so that samples cannot be counted; give the "
                "DataLoader batch_size and sampler instead of batch_sampler"
            )
        self._least = self._batch_size if getattr(batches, "drop_last", False) else 1
        self._loader = loader
        self._sampler = sampler
        self._state = sampler.state_dict()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        epoch: int = self.state_dict()["epoch"]
        return epoch

    @property
    def generator(self) -> torch.Generator | None:
        """What the DataLoader draws seeds for its workers from; None: torch's own."""
        generator: torch.Generator | None = self._loader.generator
        return generator

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        assert self._batch_size is not None
        self._sampler.load_state_dict(self.state_dict())
        self._state = self._sampler.state_dict()
        source = self.generator or torch.default_generator
        before = torch_state(source)
        batches = iter(self._loader)
        if self._state["position"]:
            source.set_state(before)  # iter() draws a seed for workers, which an epoch does once
        for batch in batches:
            self._state["position"] = min(self._state["position"] + self._batch_size, len(self._sampler))
            yield batch
        self._state = self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: `epoch`, `position` (samples of this rank's part of it that are used up) and `seed`."""
        if 0 < self._state["position"] > len(self._sampler) - self._least:
            return self._next_epoch()
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the rest of that epoch is what the next iteration yields."""
        self._sampler.load_state_dict(state)
        self._state = dict(state)

    def _next_epoch(self) -> dict[str, Any]:
        return {**self._state, "epoch": self._state["epoch"] + 1, "position": 0}
