"""NETtalk: from a letter and its three neighbours on each side, the phoneme and the stress of the letter.

A corpus file has one word a line, in four fields with tabs between: the word, its phonemes (one for each letter, `-` where it
is silent), its stress and syllable marks (one for each letter, of `<>012`), and a flag (0 regular, 1 irregular, 2 foreign).
The corpus is not shipped: it is given for research only.

The coding is 203-26. Inputs: 7 window positions from left to right, each a one-hot over `abc...z`, word boundary, comma and
full stop (29). A word is padded with word boundaries. Outputs: the 21 features of the phoneme, then a one-hot of the mark.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from tatami.datasets.dataset import Dataset, drawn
from tatami.datasets.phonemes import CODES, FEATURES, PHONEMES, STRESSES, nearest
from tatami.errors import DataError
from tatami.inputs import read_text

WINDOW = 7
BOUNDARY = "_"
ALPHABET = string.ascii_lowercase + BOUNDARY + ",."
INPUTS = WINDOW * len(ALPHABET)
OUTPUTS = len(FEATURES) + len(STRESSES)

_LETTERS = ALPHABET.replace(BOUNDARY, "")
_FLAGS = ("0", "1", "2")
_PADDING = BOUNDARY * (WINDOW // 2)


@dataclass(frozen=True, kw_only=True)
class Word:
    """A line of the corpus; `phonemes` and `stresses` have one symbol for each letter."""

    letters: str
    phonemes: str
    stresses: str
    flag: int = 0


def read_words(path: Path | str) -> tuple[Word, ...]:
    """The words of a corpus file, in its order.

    Raises:
        DataError: the file cannot be read, is empty, or has a line that is not a word; names file, line and word.
    """
    text = read_text(path, what="the NETtalk file", error=DataError, encoding="latin-1")
    lines = text.rstrip("\n").split("\n")
    if lines == [""]:
        raise DataError(
            f"{path} is empty; a NETtalk file has a word in each line: word, phonemes, stress, flag, with tabs between"
        )
    return tuple(_word(line, where=f"{path}, line {number}") for number, line in enumerate(lines, start=1))


def encode(words: tuple[Word, ...], *, samples: int | None = None, seed: int = 0) -> Dataset:
    """The letters of `words` as inputs `(samples, 203)` and targets `(samples, 26)`.

    Args:
        words: at least one.
        samples: how many letters to draw by `seed` (the classic experiment: 1024); None for all of them, in order.
        seed: of the draw; the same letters as `Dataset.draw` takes from all.

    Raises:
        InputError: there are not that many letters.
    """
    line = _indices(_PADDING + "".join(word.letters + _PADDING for word in words), symbols=ALPHABET)
    centres = np.flatnonzero(line != ALPHABET.index(BOUNDARY))
    windows = sliding_window_view(line, WINDOW)[centres - WINDOW // 2]
    phonemes = _indices("".join(word.phonemes for word in words), symbols=PHONEMES)
    stresses = _indices("".join(word.stresses for word in words), symbols=STRESSES)
    if samples is not None:
        chosen = drawn(samples, total=len(centres), seed=seed, name="nettalk")
        windows, phonemes, stresses = windows[chosen], phonemes[chosen], stresses[chosen]
    count = len(windows)
    x = np.zeros((count, WINDOW, len(ALPHABET)), dtype=np.float32)
    np.put_along_axis(x, windows[:, :, np.newaxis], 1.0, axis=2)
    y = np.concatenate([CODES[phonemes], np.eye(len(STRESSES), dtype=np.float32)[stresses]], axis=1)
    return Dataset(
        name="nettalk", x=torch.from_numpy(x.reshape(count, INPUTS)), y=torch.from_numpy(y), outputs=OUTPUTS, accuracy=accuracy
    )


def decode(outputs: torch.Tensor) -> tuple[str, str]:
    """The phonemes nearest in angle and the stress marks that are highest, one symbol for each row of `(samples, 26)`."""
    phonemes, stresses = _decoded(outputs)
    return "".join(PHONEMES[i] for i in phonemes.tolist()), "".join(STRESSES[i] for i in stresses.tolist())


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The shares of `phoneme` and of `stress` that are right, of rows `(samples, 26)`."""
    pairs = zip(("phoneme", "stress"), _decoded(outputs), _decoded(targets), strict=True)
    return {name: (answer == truth).double().mean().item() for name, answer, truth in pairs}


def _decoded(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if outputs.ndim != 2 or outputs.shape[1] != OUTPUTS:
        raise DataError(f"nettalk: outputs must be (samples, {OUTPUTS}), not {tuple(outputs.shape)}")
    values = outputs.detach().to("cpu", torch.float64)
    marks = values[:, len(FEATURES) :].numpy()
    return nearest(values[:, : len(FEATURES)]), torch.from_numpy(np.argmax(marks, axis=1))


def _indices(text: str, *, symbols: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The position of every character of `text` in `symbols`."""
    table = np.zeros(128, dtype=np.int64)
    table[[ord(symbol) for symbol in symbols]] = np.arange(len(symbols))
    return table[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]


def _word(line: str, *, where: str) -> Word:
    fields = [field.strip() for field in line.split("\t")]
    if len(fields) != 4:
        raise DataError(
            f"{where}: {fields[0]!r} has {len(fields)} fields, expected 4: word, phonemes, stress, flag, with tabs between;"
            " is the file cut?"
        )
    letters, phonemes, stresses, flag = fields
    if not len(letters) == len(phonemes) == len(stresses):
        raise DataError(
            f"{where}: {letters!r} has {len(letters)} letters, {len(phonemes)} phonemes ({phonemes!r})"
            f" and {len(stresses)} stress marks ({stresses!r}); there must be one of each for every letter"
        )
    if not letters:
        raise DataError(f"{where}: the word is empty")
    for kind, text, symbols in (
        ("letter", letters, _LETTERS),
        ("phoneme", phonemes, PHONEMES),
        ("stress mark", stresses, STRESSES),
    ):
        for position, symbol in enumerate(text):
            if symbol not in symbols:
                raise DataError(
                    f"{where}: {letters!r} has an unknown {kind} {symbol!r} at letter {position + 1}; known are {symbols}"
                )
    if flag not in _FLAGS:
        raise DataError(f"{where}: {letters!r} has the flag {flag!r}, expected 0 (regular), 1 (irregular) or 2 (foreign)")
    return Word(letters=letters, phonemes=phonemes, stresses=stresses, flag=int(flag))
