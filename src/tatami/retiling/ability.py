"""How fast a processor is, and how even the processors are, from a few noisy points.

Only +, -, *, / and the square root are used, and sums are exact (`math.fsum`): these give the same bits on every machine, so
that all ranks decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
"""Seconds and work of one iteration."""


def ability(points: Sequence[Point]) -> float | None:
    """Work per second: the slope of the least-squares line through (cumulative time, cumulative work) (section 5).

    Falls back to mean work over mean time where noise makes the slope non-positive or non-finite; None where even that
    says nothing (no work, or no time).
    """
    times: list[float] = []
    works: list[float] = []
    for index in range(len(points)):
        times.append(math.fsum(seconds for seconds, _ in points[: index + 1]))
        works.append(math.fsum(work for _, work in points[: index + 1]))
    if not points or times[-1] <= 0 or works[-1] <= 0:
        return None
    mean_time = math.fsum(times) / len(times)
    mean_work = math.fsum(works) / len(works)
    spread = math.fsum((time - mean_time) * (time - mean_time) for time in times)
    rise = math.fsum((time - mean_time) * (work - mean_work) for time, work in zip(times, works, strict=True))
    slope = rise / spread if spread > 0 else 0.0
    mean = works[-1] / times[-1]
    result = slope if math.isfinite(slope) and slope > 0 else mean
    return result if math.isfinite(result) and result > 0 else None


def estimate(
    points: Mapping[str, Sequence[Point]], *, last: Mapping[str, float], given: Mapping[str, float]
) -> dict[str, float]:
    """Work per second of every processor in `given`.

    Args:
        points: what was measured, by processor.
        last: earlier estimates; who has no points now (it had no tile) keeps its own.
        given: speeds that the run started with. Who was never measured keeps its own, scaled as the median of those that were.
    """
    known = dict(last)
    for name, own in points.items():
        speed = ability(own)
        if speed is not None:
            known[name] = speed
    scale = statistics.median(speed / given[name] for name, speed in known.items()) if known else 1.0
    return {name: known.get(name, speed * scale) for name, speed in given.items()}


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How even the processors were.

    Attributes:
        ratio: the shortest over the longest time per iteration; 1 is perfect.
        error: relative standard error of `ratio`, from the scatter of the points.
    """

    ratio: float
    fastest: str
    slowest: str
    error: float


def balance(points: Mapping[str, Sequence[Point]]) -> Balance | None:
    """Mean times compared; None where no rank measured a time. Ranks without work do not count."""
    worked = {name: own for name, own in points.items() if any(work > 0 for _, work in own)}
    means = {name: math.fsum(seconds for seconds, _ in own) / len(own) for name, own in worked.items()}
    if not means or max(means.values()) <= 0:
        return None
    fastest = min(means, key=lambda name: means[name])
    slowest = max(means, key=lambda name: means[name])
    variances = {name: _variance(points[name]) for name in means}
    freedom = math.fsum(len(points[name]) - 1 for name in means)
    pooled = math.fsum(variances[name] * (len(points[name]) - 1) for name in means) / freedom if freedom > 0 else 0.0
    # A handful of points often looks calmer than its source is: at least the variance of all processors together.
    error = math.sqrt(math.fsum(max(variances[name], pooled) / len(points[name]) for name in (fastest, slowest)))
    return Balance(ratio=means[fastest] / means[slowest], fastest=fastest, slowest=slowest, error=error)


def _variance(points: Sequence[Point]) -> float:
    """Relative sample variance of the time per work; 0 for a single point."""
    rates = [seconds / work for seconds, work in points if work > 0]
    mean = math.fsum(rates) / len(rates)
    if len(rates) < 2 or mean <= 0:
        return 0.0
    return math.fsum((rate - mean) * (rate - mean) for rate in rates) / (len(rates) - 1) / (mean * mean)
