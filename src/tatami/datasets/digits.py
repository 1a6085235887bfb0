"""Scikit-learn's digits: 1,797 handwritten digits of 8 x 8 pixels, in its wheel, so that no file is needed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from tatami.datasets.dataset import Dataset
from tatami.errors import DataError, InputError, MissingExtraError

CLASSES = 10
SIDE = 8
TARGETS = ("one_hot", "classes")


def load_digits(*, targets: str = "one_hot") -> Dataset:
    """Pixels scaled to 0..1, float32 `(1797, 64)`.

    Args:
        targets: "one_hot" for float32 `(1797, 10)`, as squared error wants them; "classes" for int64 ids `(1797,)`, as
            cross-entropy does.

    Raises:
        MissingExtraError: scikit-learn is not installed.
        InputError: `targets` is neither.
    """
    if targets not in TARGETS:
        raise InputError(f"unknown targets {targets!r} for digits; choose one of {', '.join(TARGETS)}")
    # To import scikit-learn would take a rank longer than to read its file and train on it.
    package = find_spec("sklearn")
    file = Path((package and package.origin) or "").parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        raise MissingExtraError("scikit-learn (for the digits data set)", extra="data")
    table = np.loadtxt(file, delimiter=",")
    x = torch.from_numpy((table[:, :-1] / 16.0).astype(np.float32))  # pixels count 0 to 16 dots
    ids = torch.from_numpy(table[:, -1].astype(np.int64))
    y = ids if targets == "classes" else torch.nn.functional.one_hot(ids, CLASSES).float()
    return Dataset(name="digits", x=x, y=y, outputs=CLASSES, accuracy=accuracy)


def with_shifts(digits: Dataset) -> Dataset:
    """Every digit five times: as it is, and moved by one pixel each way, which leaves it the same digit. `(5 n, 64)`."""
    images = digits.x.view(-1, SIDE, SIDE)
    moved = [images, *(images.roll(step, dims=axis) for axis in (1, 2) for step in (-1, 1))]
    return replace(digits, x=torch.cat(moved).reshape(-1, SIDE * SIDE), y=torch.cat([digits.y] * len(moved)))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The share of `digit`s that are right: outputs `(samples, 10)`, targets the same or ids `(samples,)`."""
    if outputs.ndim != 2 or outputs.shape[1] != CLASSES:
        raise DataError(f"digits: outputs must be (samples, {CLASSES}), not {tuple(outputs.shape)}")
    truth = targets if targets.ndim == 1 else targets.argmax(dim=1)
    return {"digit": (outputs.detach().argmax(dim=1) == truth.to(outputs.device)).double().mean().item()}
