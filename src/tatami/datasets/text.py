"""Any text as a task: of every character of a sequence, the next one."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch

from tatami.datasets.dataset import Dataset
from tatami.errors import InputError
from tatami.inputs import read_text

FEWEST = 10
"""Sequences that a text must have, so that some can be held out and every rank has some."""


def load_text(path: Path | str | None = None, *, tokens: int) -> Dataset:
    """A text, cut into sequences that do not overlap: int64 `(sequences, tokens)`, targets the same, one character later.

    A token is a character; its number is its place among the different characters of the text.

    Args:
        path: of a text in UTF-8 of at most 8 MiB; None for the language reference, which every Python has.
        tokens: of a sequence.

    Raises:
        InputError: the file cannot be read, is not text, or is too short.
    """
    text = "".join(pydoc_data.topics.topics.values()) if path is None else read_text(path, what="the text")
    num = (len(text) - 1) // tokens
    if num < FEWEST:
        raise InputError(
            f"{path or 'the language reference'} has {len(text):,} characters, and {FEWEST} sequences of {tokens:,} tokens "
            f"need {FEWEST * tokens + 1:,}; give a longer text, or fewer --tokens"
        )
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([numbers[letter] for letter in text[: num * tokens + 1]])
    return Dataset(
        name="text", x=ids[:-1].view(num, tokens), y=ids[1:].view(num, tokens), outputs=len(numbers), accuracy=accuracy
    )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The share of `character`s that are right: outputs `(samples, tokens, characters)`, targets `(samples, tokens)`."""
    return {"character": (outputs.detach().argmax(dim=-1) == targets.to(outputs.device)).double().mean().item()}
