"""Speeds that a user gives: checked one by one, all faults at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tatami.errors import ClusterError, InputError, shortened
from tatami.units import LARGEST_SPEED, parse_speed

SMALLEST_SPEED = 1e-12


def parse_speeds(text: str, *, expected: int | None = None) -> tuple[float, ...]:
    """The speeds in "1,1.5,2", relative or with a unit ("10 Gflop/s, 20 Gflop/s").

    Args:
        text: numbers > 0 with commas between them.
        expected: how many there must be, as many as ranks; None for any number.

    Raises:
        ClusterError: a speed is missing, not a number, NaN, infinite, zero or negative, or there are not `expected` of them.
    """
    values: list[float] = []
    problems: list[str] = []
    parts = text.split(",") if text.strip() else []
    for index, part in enumerate(parts):
        try:
            values.append(_speed(part.strip()))
        except InputError as error:
            problems.append(f"speeds[{index}]: {error}")
    problems += _wrong_number(len(parts), expected=expected)
    if problems:
        raise ClusterError(
            f"--speeds {shortened(text)!r} cannot be used; write numbers > 0, as in '1,1.5,2':", problems=problems
        )
    return tuple(values)


def check_speeds(speeds: Sequence[float], *, expected: int | None = None) -> None:
    """What `parse_speeds` checks, for `speeds` that are numbers already, relative or in flop/s.

    Raises:
        ClusterError: one line for each speed that is not a finite number > 0, and one where there are not `expected`.
    """
    problems = [f"speeds[{index}]: {problem}" for index, speed in enumerate(speeds) if (problem := speed_problem(speed))]
    problems += _wrong_number(len(speeds), expected=expected)
    if problems:
        raise ClusterError("these speeds cannot be used; give numbers > 0, one for each rank:", problems=problems)


def speed_problem(speed: float) -> str | None:
    """Why `speed` cannot be one; None where it can."""
    if not math.isfinite(speed):
        return f"must be a finite number > 0, not {speed:g}"
    if not speed > 0:
        return f"must be > 0, not {speed:g}"
    if not SMALLEST_SPEED <= speed <= LARGEST_SPEED:
        return f"must be from {SMALLEST_SPEED:g} to {LARGEST_SPEED:g}, not {speed:g}"
    return None


def _speed(text: str) -> float:
    if not text:
        raise InputError("is missing")
    try:
        number = float(text)
    except ValueError:
        number = parse_speed(text)
    if problem := speed_problem(number):
        raise InputError(problem)
    return number


def _wrong_number(found: int, *, expected: int | None) -> list[str]:
    if found == 0:
        return ["speeds: there is none"]
    if expected is not None and found != expected:
        return [f"speeds: {found} given, expected {expected}, one for each rank"]
    return []
