"""What a data set is to training: inputs, targets, and how to tell how good an answer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from tatami.errors import DataError, InputError
from tatami.inputs import check_seed


@runtime_checkable
class Samples(Protocol):
    """A map-style data set: `len(data)` samples, each `data[i] == (x, y)`.

    Every `torch.utils.data.Dataset` with a length is of this kind.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]: ...


Data = tuple[torch.Tensor, torch.Tensor] | Samples
"""All inputs (samples, ...) and all targets (samples, ...) as tensors, or a map-style data set."""


Accuracy = Callable[[torch.Tensor, torch.Tensor], dict[str, float]]
"""Shares of right answers by name, from outputs `(samples, outputs)` and their targets; the first one is the headline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Samples of a task.

    Attributes:
        name: of the task.
        x: inputs, float32 `(samples, inputs)`.
        y: targets, float32 `(samples, outputs)`, or int64 class ids `(samples,)`.
        outputs: how many outputs a network for it has.
        accuracy: as `Accuracy` says.
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    outputs: int
    accuracy: Accuracy

    def __post_init__(self) -> None:
        if self.x.shape[0] != self.y.shape[0]:
            raise DataError(f"{self.name}: {self.x.shape[0]} inputs but {self.y.shape[0]} targets; one of each is needed")

    @property
    def samples(self) -> int:
        return self.x.shape[0]

    @property
    def inputs(self) -> int:
        return self.x.shape[1]

    def draw(self, samples: int, *, seed: int) -> Dataset:
        """`samples` different ones, drawn by `seed`.

        Raises:
            InputError: there are not that many.
        """
        return self._at(drawn(samples, total=self.samples, seed=seed, name=self.name))

    def split(self, *, test_fraction: float, seed: int) -> tuple[Dataset, Dataset]:
        """Samples to train on, and others to test with: shuffled by `seed`, at least one in each part.

        Raises:
            InputError: `test_fraction` leaves a part without a sample.
        """
        num_test = round(self.samples * test_fraction) if 0 < test_fraction < 1 else 0
        if not 0 < num_test < self.samples:
            raise InputError(
                f"{self.name}: test_fraction {test_fraction} of {self.samples} samples leaves a part empty; take one in (0, 1)"
            )
        order = drawn(self.samples, total=self.samples, seed=seed, name=self.name)
        return self._at(order[num_test:]), self._at(order[:num_test])

    def _at(self, indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Dataset:
        chosen = torch.from_numpy(indices)
        return replace(self, x=self.x[chosen], y=self.y[chosen])


def drawn(samples: int, *, total: int, seed: int, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The indices of `samples` of `total`, none twice: the head of the permutation that belongs to `seed`.

    Raises:
        InputError: there are not that many, or an invalid `seed`.
    """
    check_seed(seed)
    if not 0 < samples <= total:
        raise InputError(f"{name}: cannot draw {samples} samples, there are {total}; ask for 1 to {total}")
    return np.random.default_rng(seed).permutation(total)[:samples].astype(np.int64)
