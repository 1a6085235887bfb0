"""Numbers of options: what the type of an option cannot say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import typer

from tatami.errors import InputError
from tatami.units import parse_size

Number = TypeVar("Number", int, float)

MOST_RANKS = 4096
"""That one command starts. More are for a launcher of the site's own."""


def finite(value: float | None) -> float | None:
    """The callback of every option that takes a number with a point.

    Raises:
        BadParameter: NaN, or infinite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, not {value}")
    return value


def given(option: str, parse: Callable[[str], Number], text: str) -> Number:
    """What `parse` makes of the text of an option.

    Raises:
        InputError: as `parse`, with the name of the option.
    """
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def given_sizes(option: str, text: str) -> tuple[int, ...]:
    """Sizes in bytes, with commas between them. Raises as `given`."""
    return tuple(given(option, parse_size, size.strip()) for size in text.split(","))
