"""Batches that a `DataLoader` or any other iterable gives whole, to every rank; each takes its own samples of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from tatami.batch import cut_batch, samples_of
from tatami.comm.agreement import problems_of
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.model.model import TiledModel
from tatami.random_state import random_state, set_random_state
from tatami.runtime.phases import IterationPhase
from tatami.tiling import Span
from tatami.train.batches import AbstractBatches, LocalBatch


class LoadedBatches(AbstractBatches):
    """The global batches of an iterable, which may have no length.

    One batch is drawn ahead, so that the ranks know which is the last. Both it and training may draw random numbers, so that
    the random state of before it was drawn is kept until it is used.

    Args:
        loader: gives the same batches, in the same order, on every rank.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader: Any = loader
        self._batches: Iterator[Any] | None = None
        self._first: Any = None
        self._start: dict[str, Any] = {}
        self._ahead: dict[str, Any] | None = None
        self._sought: dict[str, Any] = {}
        self._loader_state: Any = None
        knows = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._is_resumable = knows and getattr(loader, "is_resumable", True)
        self.num_batches = _length(loader)
        self.batch_size = getattr(loader, "batch_size", None)
        self.num_samples = None
        if isinstance(loader, DataLoader) and self.num_batches is not None and self.batch_size is not None:
            counted: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
            self.num_samples = min(len(counted), self.num_batches * self.batch_size)

    def compare(self, comm: AbstractCommunicator) -> None:
        """Nothing can be told before the first pass, in which the ranks compare numbers of their batches."""

    def sample(self, most: int) -> tuple[Any, int]:
        if self._batches is None:
            self._begin()
        if self._first is None:
            raise InputError("the data gave no batch")
        samples = samples_of(self._first)
        return cut_batch(self._first, Span(0, min(most, samples)), samples=samples), samples

    def epoch(
        self, number: int, model: TiledModel, *, skip: int = 0, most: int | None = None, agree: bool = False
    ) -> Iterator[LocalBatch]:
        phases, used, is_enough = model.phases, 0, False
        with phases.during(IterationPhase.OUTSIDE):
            current = self._go_on(skip)
        if not (skip and model.comm.changes):  # a rank that joins in mid-epoch would be the only one that begins to draw
            self._check_begun(current, model.comm, number=number, skip=skip)
        while current is not None:
            with phases.during(IterationPhase.OUTSIDE):
                used += 1
                is_enough = used == most
                upcoming = self._ahead = None
                if not is_enough or self._may_draw_more:
                    upcoming = self._draw()
                    if is_enough and self._is_resumable:
                        self._loader.load_state_dict(self._loader_state)  # so that the next `fit` is given that batch
                is_last = upcoming is None and not is_enough
                if agree:
                    ends = problems_of(model.comm, "ends" if is_last else None)
                    check_ends(ends, size=model.comm.size, batch=skip + used, epoch=number)
                portion = LocalBatch(size=samples_of(current), here=model.take(current, everywhere=True), is_last=is_last)
            yield portion
            current = None if is_enough else upcoming
        if not is_enough:
            self._batches = self._ahead = None

    def position(self) -> dict[str, Any]:
        """The random state as it is now, as it was before the batch ahead was drawn, and before the first of the epoch was."""
        if self._sought:
            return dict(self._sought)
        own: dict[str, Any] = {"now": self._random_state()}
        if self._ahead is not None:
            own["ahead"] = self._ahead
        if self._is_resumable:
            own["loader"] = self._loader.state_dict() if self._ahead is None else self._loader_state
        elif self._batches is not None:
            own["start"] = self._start
        return own

    def seek(self, position: dict[str, Any]) -> None:
        self._sought = position
        self._batches = self._first = self._ahead = None
        self._put_back(position["now"])

    def begin_again(self) -> None:
        if isinstance(self._loader, Iterator):
            raise InputError(
                "the data are an iterator, which can be gone through once, and in an elastic run a batch may have to be drawn "
                "again: give what begins again, as a DataLoader"
            )
        sampler = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "state_dict") and not self._is_resumable:
            raise InputError(
                f"the DataLoader's {type(sampler).__name__} counts its epochs, and would give another order where batches are "
                "drawn again in an elastic run: give tatami.parallel.ResumableLoader(loader)"
            )
        super().begin_again()

    def _go_on(self, skip: int) -> Any:
        """The first batch that was not used before."""
        sought, self._sought = self._sought, {}
        if not sought:
            if self._batches is None:
                self._begin()
            current, self._first = self._first, None
            return current
        start, ahead, now = sought.get("start"), sought.get("ahead"), sought["now"]
        is_over = skip > 0 and start is None
        if "loader" in sought:
            self._loader.load_state_dict(sought["loader"])
            is_over = self.num_batches is not None and skip >= self.num_batches  # the loader is at the next epoch already
        if is_over:
            self._put_back(now)
            return None
        if start is not None:
            self._put_back(start)  # so that the order of the samples is drawn again
        self._iterate()
        for _ in range(skip if start is not None else 0):
            self._next()
        if skip or ahead is not None:
            self._put_back(ahead or now)  # what was used was drawn in between other draws, which are not repeated
        current = self._draw()
        if ahead is not None:
            self._put_back(now)
        return current

    @property
    def _may_draw_more(self) -> bool:
        """Whether a batch may be drawn that this `fit` does not use, as one without a limit would: not of a stream."""
        return self.num_batches is not None and not isinstance(self._loader, Iterator)

    @property
    def _generators(self) -> dict[str, torch.Generator]:
        """What the loader and its samplers draw the order from, where that is not torch's own."""
        batches = getattr(self._loader, "batch_sampler", None)
        drawers = {
            "generator": self._loader,
            "sampler generator": getattr(self._loader, "sampler", None),
            "batch generator": batches,
            "inner generator": getattr(batches, "sampler", None),
        }
        found = {name: getattr(each, "generator", None) for name, each in drawers.items()}
        return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}

    def _random_state(self) -> dict[str, Any]:
        return random_state() | {name: each.get_state() for name, each in self._generators.items()}

    def _put_back(self, state: dict[str, Any]) -> None:
        set_random_state(state)
        for name, generator in self._generators.items():
            if name in state:
                generator.set_state(state[name])

    def _begin(self) -> None:
        self._iterate()
        self._first = self._draw()

    def _iterate(self) -> None:
        self._start = self._random_state()
        self._batches = iter(self._loader)

    def _draw(self) -> Any:
        """The next batch; where it was drawn is remembered until it is used."""
        self._ahead = self._random_state()
        self._loader_state = self._loader.state_dict() if self._is_resumable else None
        return self._next()

    def _next(self) -> Any:
        assert self._batches is not None
        return next(self._batches, None)

    def _check_begun(self, current: Any, comm: AbstractCommunicator, *, number: int, skip: int) -> None:
        missing = problems_of(comm, "no batch" if current is None else None)
        check_ends(missing, size=comm.size, batch=skip, epoch=number)
        if missing and not skip:
            again = "; an iterator can be gone through once, so give what begins again, as a DataLoader" if number else ""
            raise InputError(f"the data gave no batch in epoch {number}{again}")


def check_ends(ends: dict[int, Any], *, size: int, batch: int, epoch: int) -> None:
    """
    Args:
        ends: by rank, those whose data end after `batch`; the same on all ranks.
        batch: counted from 1.
        epoch: from 0.

    Raises:
        InputError: the data of some ranks end here, and those of others go on.
    """
    if ends and len(ends) < size:
        more = next(rank for rank in range(size) if rank not in ends)
        raise InputError(
            f"the ranks were given different data: in epoch {epoch}, those of rank {min(ends)} end after batch {batch}, those "
            f"of rank {more} do not. Every rank must be given the same global batches; or draw them on one rank "
            "(tatami.parallel.MultiNodeLoader)"
        )


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
