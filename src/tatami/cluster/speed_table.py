"""A speed that depends on the size of the tile: a small one leaves a GPU idle, a large one outgrows a CPU's cache.

    Processor(name="gpu0", speed=SpeedTable([(1e6, 1e11), (1e9, 4e12), (1e11, 6e12)]))

Sizes are what a tile computes in an iteration, in the unit of the speed: flop, or units of work where speeds count those.
Time is a straight line between the sizes, so that `t0 + a x` needs two of them; outside of them the speed stays as it is.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, final

from tatami.errors import ClusterError, InputError, shortened
from tatami.units import LARGEST_SPEED, format_speed, parse_speed

SMALLEST_SPEED = 1e-12
MEASURED_FROM = 1e6
"""Where the fastest is no slower, speeds are flop/s: relative speeds do not go up to a million."""


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
    problems += [f"speeds[{index}]: {problem}" for index, problem in missing_units(values).items() if not problems]
    problems += _wrong_number(len(parts), expected=expected)
    if problems:
        raise ClusterError(
            f"--speeds {shortened(text)!r} cannot be used; write numbers > 0, as in '1,1.5,2':", problems=problems
        )
    return tuple(values)


def missing_units(speeds: Sequence[float]) -> dict[int, str]:
    """What is wrong with each speed whose unit was forgotten, by index: a relative speed among others in flop/s."""
    most = max(speeds, default=0.0)
    small = {index: speed for index, speed in enumerate(speeds) if speed < MEASURED_FROM <= most}
    return {
        index: f"{speed:g} flop/s next to {format_speed(most, digits=3)}: write '{speed:g} Gflop/s' or another unit, or "
        "relative speeds for all"
        for index, speed in small.items()
    }


def check_speeds(speeds: Sequence[float], *, expected: int | None = None) -> None:
    """What `parse_speeds` checks, for `speeds` that are numbers already, relative or in flop/s.

    Raises:
        ClusterError: one line for each speed that is not a finite number > 0, and one where there are not `expected`.
    """
    problems = [f"speeds[{index}]: {problem}" for index, speed in enumerate(speeds) if (problem := speed_problem(speed))]
    problems += _wrong_number(len(speeds), expected=expected)
    if problems:
        raise ClusterError("these speeds cannot be used; give numbers > 0, one for each rank:", problems=problems)


def listed_speeds(
    speeds: Any, *, rule: str = "speeds must be a number > 0 for each rank", error: type[InputError] = ClusterError
) -> tuple[float, ...]:
    """The speeds that were given to a function, as numbers.

    Args:
        speeds: numbers, or tables by size, in the order of the ranks; a list, an array, whatever can be gone through.
        rule: what may be given, for errors.
        error: which kind to raise.

    Raises:
        ClusterError: `speeds` is something else, or empty, or holds what is no speed; says the rule, and what was given.
    """
    values = []
    if not isinstance(speeds, (str, bytes, Mapping, Set)):  # the order of those is not that of the ranks
        with contextlib.suppress(TypeError):
            values = list(speeds)
    if not values:
        raise error(f"{rule}, not {shortened(repr(speeds))}")
    for index, speed in enumerate(values):
        if problem := speed_problem(speed):
            raise error(f"{rule}; speeds[{index}] {problem}")
    return tuple(speed if isinstance(speed, SpeedTable) else float(speed) for speed in values)


def speed_problem(speed: Any) -> str | None:
    """Why `speed` cannot be one; None where it can."""
    number = _number(speed)
    if number is None:
        return f"must be a number > 0, not {shortened(repr(speed))}"
    if not math.isfinite(number):
        return f"must be a finite number > 0, not {number:g}"
    if not number > 0:
        return f"must be > 0, not {number:g}"
    if not SMALLEST_SPEED <= number <= LARGEST_SPEED:
        return f"must be from {SMALLEST_SPEED:g} to {LARGEST_SPEED:g}, not {number:g}"
    return None


def _number(value: Any) -> float | None:
    """None for a text, a list, or an array of numbers."""
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", None):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
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


MOST_POINTS = 64
LARGEST_SIZE = 1e30
_ROUNDING = 1e-9


@final
class SpeedTable(float):
    """A speed by size. As a number it is the speed at its largest size, for what needs no more than a number.

    Args:
        points: (size in flop, speed in flop/s), at least two, or both in units of the cluster's own; a larger tile must not
            take less time.

    Attributes:
        points: in the order of their sizes.

    Raises:
        ClusterError: says what is wrong with the points.
    """

    points: tuple[tuple[float, float], ...]

    def __new__(cls, points: Iterable[tuple[float, float]]) -> SpeedTable:
        kept = tuple(sorted((float(size), float(speed)) for size, speed in points))
        if problem := points_problem(kept):
            raise ClusterError(f"this speed by size cannot be used: it {problem}")
        table = super().__new__(cls, kept[-1][1])
        table.points = kept
        return table

    def __getnewargs__(self) -> tuple[tuple[tuple[float, float], ...]]:  # type: ignore[override]
        return (self.points,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpeedTable) and self.points == other.points

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.points)

    def __repr__(self) -> str:
        return f"SpeedTable({list(self.points)})"

    @property
    def fastest(self) -> float:
        """At the size where it is: no tile is computed at a higher speed."""
        return max(speed for _, speed in self.points)

    def at(self, size: float) -> float:
        """The speed at which a tile of `size`, in the unit of the points, is computed."""
        index = bisect_left(self.points, (size, 0.0))
        if index == 0 or index == len(self.points):
            return self.points[min(index, len(self.points) - 1)][1]
        (low, slow), (high, fast) = self.points[index - 1], self.points[index]
        low_time = low / slow
        return size / (low_time + (high / fast - low_time) * ((size - low) / (high - low)))

    def size_in(self, time: float) -> float:
        """The size of the largest tile that takes at most `time`, in the unit that size over speed has: seconds."""
        times = [size / speed for size, speed in self.points]
        index = bisect_right(times, time)
        if index == 0 or index == len(times):
            return time * self.points[min(index, len(times) - 1)][1]
        (low, _), (high, _) = self.points[index - 1], self.points[index]
        return low + (high - low) * ((time - times[index - 1]) / (times[index] - times[index - 1]))

    def scaled(self, *, size: float = 1.0, speed: float = 1.0) -> SpeedTable:
        """In other units: every size times `size`, every speed times `speed`."""
        return SpeedTable((own * size, fast * speed) for own, fast in self.points)


def points_problem(points: tuple[tuple[float, float], ...]) -> str | None:
    """Why these points, in the order of their sizes, make no `SpeedTable`; None where they do."""
    if not 2 <= len(points) <= MOST_POINTS:
        return f"must have from 2 to {MOST_POINTS} sizes, not {len(points)}; one speed for all sizes is a number"
    last_size, last_time = 0.0, 0.0
    for size, speed in points:
        if not 0 < size <= LARGEST_SIZE:
            return f"must have sizes > 0 and at most {LARGEST_SIZE:g} flop, not {size:g}"
        if problem := speed_problem(speed):
            return f"has a speed that {problem}"
        if size == last_size:
            return f"has two speeds for size {size:g}"
        if size / speed < last_time * (1 - _ROUNDING):
            times = f"{size / speed:.6g} after {last_time:.6g}"
            return f"lets a tile of {size:g} flop take less time than one of {last_size:g}: {times}"
        last_size, last_time = size, size / speed
    return None


def speed_at(speed: float, size: float) -> float:
    """What `speed` is for a tile of `size` flop, whether it depends on it or not."""
    return speed.at(size) if isinstance(speed, SpeedTable) else speed


def at_sizes(speeds: Mapping[str, float], sizes: Mapping[str, float]) -> dict[str, float]:
    """Plain speeds by name; those without a size are as at their largest."""
    return {name: speed_at(speed, sizes.get(name, math.inf)) for name, speed in speeds.items()}


def fastest(speed: float) -> float:
    """The most that `speed` can be, in its own unit."""
    return speed.fastest if isinstance(speed, SpeedTable) else speed
