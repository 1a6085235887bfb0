"""Input files and numbers that users give: refused where they are invalid, before anything is made of them."""

from __future__ import annotations

import math
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from tatami.errors import InputError, shortened
from tatami.outputs import kind_of
from tatami.units import format_size

LARGEST_TEXT_BYTES = 8 << 20
"""Largest description: 60,000 links take 5 MB."""
LARGEST_SEED = 2**64 - 1


def check_input(path: Path | str, *, what: str, error: type[InputError] = InputError, largest_bytes: int | None = None) -> None:
    """Check a file before it is read: a device or a FIFO might never end.

    Args:
        path: of the file.
        what: how errors call it: "the cluster file".
        error: which kind to raise.
        largest_bytes: of such a file; None for any size.

    Raises:
        InputError: there is no such file, it is not a regular file, or it is too large.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise error(f"cannot read {what} {shortened(str(path))}: {reason}") from None
    if not stat.S_ISREG(found.st_mode):
        raise error(f"cannot read {what} {path}: it is {kind_of(found.st_mode)}; give a regular file")
    if largest_bytes is not None and found.st_size > largest_bytes:
        raise error(
            f"cannot read {what} {path}: it has {format_size(found.st_size, digits=3)}, and no such file has more than "
            f"{format_size(largest_bytes, digits=3)}"
        )


def read_text(
    path: Path | str,
    *,
    what: str,
    error: type[InputError] = InputError,
    encoding: str = "utf-8-sig",
    largest_bytes: int | None = LARGEST_TEXT_BYTES,
) -> str:
    """The text of a file, by default of at most 8 MiB and without the byte order mark of some editors. See `check_input`.

    Raises:
        InputError: as `check_input`; or it cannot be read, or is not text.
    """
    check_input(path, what=what, error=error, largest_bytes=largest_bytes)
    try:
        return Path(path).read_text(encoding=encoding)
    except OSError as problem:
        raise error(f"cannot read {what} {path}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise error(f"cannot read {what} {path}: it is not text in UTF-8 (byte {problem.start})") from None


def read_toml(path: Path | str, *, what: str, error: type[InputError] = InputError) -> dict[str, Any]:
    """The tables of a TOML file. Raises as `read_text`, also where it is not TOML."""
    text = read_text(path, what=what, error=error)
    try:
        return tomllib.loads(text)
    except ValueError as problem:  # also of numbers with thousands of digits
        raise error(f"{path} is not TOML: {shortened(str(problem))}") from None
    except RecursionError:
        raise error(f"{path} is not TOML that can be read: its values are nested too deeply") from None


def check_finite(value: float, *, name: str) -> None:
    """
    Raises:
        InputError: `value` is NaN or infinite.
    """
    if not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, not {value}")


def check_at_least(least: int, **numbers: Any) -> None:
    """
    Raises:
        InputError: one of `numbers` is less than `least` or not whole; says which. None is left out.
    """
    for name, number in numbers.items():
        if isinstance(number, float):
            raise InputError(f"{name} must be a whole number, not {number!r}")
        if number is not None and number < least:
            raise InputError(f"{name} must be at least {least}, not {number}")


def check_seed(seed: int) -> int:
    """The seed itself.

    Raises:
        InputError: no number from 0 to 2**64 - 1: torch, NumPy and the simulator take no other.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"a seed must be a whole number from 0 to 2**64 - 1, not {shortened(str(seed))}")
    return seed
