"""A data set by name, as the command line asks for it."""

from __future__ import annotations

from pathlib import Path

from tatami.datasets.dataset import Dataset
from tatami.datasets.digits import load_digits
from tatami.datasets.nettalk import encode, read_words
from tatami.errors import InputError

NAMES = ("digits", "nettalk")
DEFAULT = "digits"


def load(
    name: str = DEFAULT, *, path: Path | str | None = None, samples: int | None = None, seed: int = 0, targets: str = "one_hot"
) -> Dataset:
    """The data set called `name`.

    Args:
        name: one of `NAMES`.
        path: the corpus file, for nettalk.
        samples: how many to draw by `seed`; None for all, in the order of the source.
        seed: of the draw.
        targets: for digits, "one_hot" or "classes"; nettalk's are its features.

    Raises:
        InputError: an unknown name; a file missing where one is needed, or given where none is; too many samples.
        DataError: the file is not what it should be; names the line.
        MissingExtraError: the data set comes with a package that is not installed.
    """
    if name == "nettalk":
        if path is None:
            raise InputError(
                "nettalk needs its corpus file, which is not shipped: give its path (--nettalk FILE), or take digits"
            )
        if targets != "one_hot":
            raise InputError(f"nettalk has features as targets, not {targets!r}; several are on at once")
        return encode(read_words(path), samples=samples, seed=seed)
    if name == "digits":
        if path is not None:
            raise InputError(
                f"digits comes with scikit-learn and reads no file, but {path} was given; did you mean --data nettalk?"
            )
        digits = load_digits(targets=targets)
        return digits if samples is None else digits.draw(samples, seed=seed)
    raise InputError(f"unknown data set {name!r}; choose one of {', '.join(NAMES)}")
