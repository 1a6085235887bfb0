"""A DataLoader that can be interrupted and resumed: it counts what the loop has got, not what workers have drawn ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from tatami.errors import InputError
from tatami.parallel.sampling import SynchronizedSampler


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
        """That the next batch is of."""
        epoch: int = self.state_dict()["epoch"]
        return epoch

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        assert self._batch_size is not None
        self._sampler.load_state_dict(self.state_dict())
        self._state = self._sampler.state_dict()
        for batch in self._loader:
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
