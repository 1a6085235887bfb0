"""Batches that a `DataLoader` or any other iterable gives whole, to every rank; each takes its own samples of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from tatami.batch import cut_batch, samples_of
from tatami.comm.agreement import problems_of
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.model.model import TiledModel
from tatami.runtime.phases import IterationPhase
from tatami.runtime.random_state import random_state, set_random_state
from tatami.tiling import Span
from tatami.train.batches import AbstractBatches, LocalBatch


class LoadedBatches(AbstractBatches):
    """The global batches of an iterable, which may have no length.

    One batch is drawn ahead, so that the ranks know which is the last.

    Args:
        loader: gives the same batches, in the same order, on every rank.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader: Any = loader
        self._batches: Iterator[Any] | None = None
        self._first: Any = None
        self._start: dict[str, Any] = {}
        self._sought: dict[str, Any] = {}
        self._loader_state: Any = None
        self._is_ahead = False
        knows = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._is_resumable = knows and getattr(loader, "is_resumable", True)
        self.num_batches = _length(loader)
        self.batch_size = getattr(loader, "batch_size", None)
        self.num_samples = None
        if isinstance(loader, DataLoader) and self.num_batches is not None and self.batch_size is not None:
            self.num_samples = min(len(loader.sampler), self.num_batches * self.batch_size)  # type: ignore[arg-type]

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
        self._check_begun(current, model.comm, number=number, skip=skip)
        while current is not None:
            with phases.during(IterationPhase.OUTSIDE):
                self._loader_state = self._loader.state_dict() if self._is_resumable else None
                used += 1
                is_enough = used == most
                upcoming = None if is_enough else self._draw()
                self._is_ahead = not is_enough
                is_last = upcoming is None and not is_enough
                if agree:
                    ends = problems_of(model.comm, "ends" if is_last else None)
                    check_ends(ends, size=model.comm.size, batch=skip + used, epoch=number)
                portion = LocalBatch(size=samples_of(current), here=model.take(current, everywhere=True), is_last=is_last)
            yield portion
            current = upcoming
        if not is_enough:
            self._batches = self._loader_state = None

    def position(self) -> dict[str, Any]:
        if self._sought:
            return dict(self._sought)
        own: dict[str, Any] = {"ahead": self._is_ahead}
        if self._is_resumable:
            own["loader"] = self._loader.state_dict() if self._batches is None else self._loader_state
        elif self._batches is not None:
            own["start"] = self._start
        elif (generator := self._generator) is not None:
            own["generator"] = generator.get_state()
        return {**super().position(), **own}

    def seek(self, position: dict[str, Any]) -> None:
        self._sought = position
        self._batches = self._first = None

    def begin_again(self) -> None:
        if isinstance(self._loader, Iterator):
            raise InputError(
                "the data are an iterator, which can be gone through once, and in an elastic run a batch may have to be drawn "
                "again: give what begins again, as a DataLoader"
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
        if "loader" in sought:
            self._loader.load_state_dict(sought["loader"])
            if self.num_batches is not None and skip >= self.num_batches:
                return None  # the loader is at the next epoch already
            skip = 0
        generator = self._generator
        if "start" in sought:
            # What was drawn in the order of another random state is drawn again in that order.
            set_random_state(sought["start"]["all"])
            if generator is not None:
                generator.set_state(sought["start"]["generator"])
        else:
            set_random_state(sought["now"])
            if generator is not None and "generator" in sought:
                generator.set_state(sought["generator"])
        self._begin()
        current, self._first = self._first, None
        for number in range(skip):
            if number == skip - 1 and not sought["ahead"]:
                set_random_state(sought["now"])
            current = self._draw()
        if skip and sought["ahead"]:
            set_random_state(sought["now"])
        return current

    @property
    def _generator(self) -> torch.Generator | None:
        """What the loader draws its order from, where that is not torch's own."""
        generator = getattr(self._loader, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def _begin(self) -> None:
        self._start = {"all": random_state()}
        if self._generator is not None:
            self._start["generator"] = self._generator.get_state()
        self._batches = iter(self._loader)
        self._first = self._draw()

    def _draw(self) -> Any:
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
        size: the number of ranks.
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
