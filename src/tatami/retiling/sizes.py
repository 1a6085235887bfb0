"""Speed as a function of size: a tile that outgrows a cache is slower, one that is very small has its fixed costs.

Time per work is a straight line between the few sizes that re-tilings have shown, and flat outside of them.
"""

from __future__ import annotations

import bisect
import math

LEAST_DIFFERENCE = 0.03
"""Relative: sizes whose times differ by less are one point, so that a machine like most has a speed and no curve."""
CERTAINTY = 3.0
_MOST_POINTS = 6


class SizedTimes:
    """Seconds per work by work, of every processor."""

    def __init__(self, num: int) -> None:
        self._points: list[list[tuple[float, float]]] = [[] for _ in range(num)]

    def points(self, rank: int) -> tuple[tuple[float, float], ...]:
        """(work, seconds per work) in the order of the sizes; none where one number says all."""
        return tuple(self._points[rank])

    def learn(self, rank: int, *, work: float, per_work_s: float, error: float) -> None:
        """What a tile of so much work took; replaces a point of nearly the same size.

        Args:
            rank: whose.
            work: of the tile.
            per_work_s: as measured.
            error: its relative standard error.
        """
        points = self._points[rank]
        expected = self.at(rank, work=work)
        if expected is not None and abs(per_work_s - expected) <= max(LEAST_DIFFERENCE, CERTAINTY * error) * expected:
            return
        points[:] = [point for point in points if not math.isclose(point[0], work, rel_tol=0.1)]
        bisect.insort(points, (work, per_work_s))
        if len(points) > _MOST_POINTS:
            # The one farthest from the size of now says least about it.
            points.remove(max(points, key=lambda point: abs(point[0] - work)))

    def at(self, rank: int, *, work: float) -> float | None:
        """Seconds per work at a size; None where nothing is known."""
        points = self._points[rank]
        if not points:
            return None
        index = bisect.bisect_left(points, (work, 0.0))
        if index == 0 or index == len(points):
            return points[min(index, len(points) - 1)][1]
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * ((work - low) / (high - low))

    def relative(self, rank: int, *, work: float, now: float) -> float:
        """How many times as long a unit of work takes at this size as at the size of now."""
        there, here = self.at(rank, work=work), self.at(rank, work=now)
        return 1.0 if there is None or here is None else there / here

    def scale(self, rank: int, factor: float) -> None:
        """The processor became slower by this factor, at every size."""
        self._points[rank] = [(work, per_work_s * factor) for work, per_work_s in self._points[rank]]
