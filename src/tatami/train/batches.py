"""Global batches, one after the other, and what of each is this rank's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tatami.comm.base import AbstractCommunicator
from tatami.model.model import TiledModel
from tatami.random_state import random_state, set_random_state


@dataclass(frozen=True, kw_only=True)
class LocalBatch:
    """One global batch as a rank sees it.

    Attributes:
        size: samples of the global batch.
        here: this rank's samples (samples_here, ...), in the structure of the batch.
        is_last: whether the epoch ends with it.
    """

    size: int
    here: Any
    is_last: bool


class AbstractBatches(ABC):
    """Data in global batches. Every rank must be given the same data.

    Attributes:
        num_samples: of an epoch; None where that is not known before its end.
        num_batches: the same.
        batch_size: of the global batch, the last one of an epoch apart; None where it is not known before the first.
    """

    num_samples: int | None
    num_batches: int | None
    batch_size: int | None

    @abstractmethod
    def compare(self, comm: AbstractCommunicator) -> None:
        """Whether all ranks have the same data, as far as it can be told before they are used. Collective.

        Raises:
            InputError: they have not; names the ranks.
        """

    @abstractmethod
    def sample(self, most: int) -> tuple[Any, int]:
        """The first samples, `most` at the most, and the size of the first global batch: for following a network."""

    @abstractmethod
    def epoch(
        self, number: int, model: TiledModel, *, skip: int = 0, most: int | None = None, agree: bool = False
    ) -> Iterator[LocalBatch]:
        """The global batches of an epoch; the tiling may change between two of them. Collective.

        Args:
            number: of the epoch, from 0.
            model: tells which samples are this rank's.
            skip: batches that were used before, and are left out.
            most: batches that will be used; None: all.
            agree: whether the ranks tell each other of every batch whether it is the last; otherwise the caller does.
        """

    def facts(self) -> dict[str, Any]:
        """What makes the batches of an epoch what they are, for a run that goes on in mid-epoch."""
        return {"batch_size": self.batch_size}

    def position(self) -> dict[str, Any]:
        """What is needed beside the number of batches to go on with the next one: the random state, and the loader's own."""
        return {"now": random_state()}

    def begin_again(self) -> None:
        """Go through the data from the beginning, also where a pass was broken off.

        Raises:
            InputError: they can be gone through only once.
        """
        self.seek(self.position())

    def seek(self, position: dict[str, Any]) -> None:
        """What `position` returned, before an epoch that is gone on with."""
        set_random_state(position["now"])
