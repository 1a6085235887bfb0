"""Speed as a function of size: a tile that outgrows a cache is slower, one that is very small has its fixed costs.

What re-tilings have shown of each processor is a `SpeedTable` of few points, in units of work. Nothing is hoped for between two
of them: a size that was not seen is taken to be as slow as the next larger one, or planners would try one after the other. A
table that was given with the cluster is where it begins: its form is believed, its height is measured.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from itertools import pairwise

from tatami.cluster import SpeedTable

LEAST_DIFFERENCE = 0.03
"""Relative: sizes whose times differ by less are one point, so that a machine like most has a speed and no curve."""
CERTAINTY = 3.0
_MOST_POINTS = 6
_STEP = 1.001
"""So much larger than what was seen is another size."""


class SizedTimes:
    """Seconds per work by work, of every processor.

    Args:
        num: of processors.
        given: what was known of some before, by rank; only the ratios of their speeds count.
    """

    def __init__(self, num: int, *, given: Mapping[int, SpeedTable] | None = None) -> None:
        self._points: list[list[tuple[float, float]]] = [[] for _ in range(num)]
        self._given = frozenset(given or ())
        self._unmeasured = set(self._given)
        for rank, table in (given or {}).items():
            self._points[rank] = [(work, 1.0 / speed) for work, speed in table.points]
        self._most = [max(_MOST_POINTS, len(points)) for points in self._points]

    def points(self, rank: int) -> tuple[tuple[float, float], ...]:
        """(work, seconds per work) in the order of the sizes; none where one number says all."""
        return tuple(self._points[rank])

    def learn(self, rank: int, *, work: float, per_work_s: float, error: float) -> None:
        """What a tile of so much work took; replaces a point of nearly the same size, and those that contradict it.

        Args:
            rank: whose.
            work: of the tile.
            per_work_s: as measured.
            error: its relative standard error.
        """
        points = self._points[rank]
        expected = self.at(rank, work=work)
        if expected is not None and rank in self._unmeasured:
            self.scale(rank, per_work_s / expected)
            self._unmeasured.discard(rank)
            return
        if expected is not None and abs(per_work_s - expected) <= max(LEAST_DIFFERENCE, CERTAINTY * error) * expected:
            return
        took_s = work * per_work_s
        # No larger tile takes less time: what says so was of another state of the machine.
        points[:] = [
            (size, each_s)
            for size, each_s in points
            if not math.isclose(size, work, rel_tol=0.1)
            and (size * each_s <= took_s if size < work else size * each_s >= took_s)
        ]
        bisect.insort(points, (work, per_work_s))
        if len(points) > self._most[rank]:
            # The one farthest from the size of now says least about it.
            points.remove(max(points, key=lambda point: abs(point[0] - work)))

    def at(self, rank: int, *, work: float) -> float | None:
        """Seconds per work at a size; None where nothing is known."""
        points = self._points[rank]
        if len(points) < 2:
            return points[0][1] if points else None
        return 1.0 / self._table(rank).at(work)

    def speed(self, rank: int, *, work: float, speed: float) -> float:
        """A speed that was measured at a size; a table where it depends on it."""
        here_s = self.at(rank, work=work)
        if here_s is None or len(self._points[rank]) < 2:
            return speed
        return self._table(rank).scaled(speed=speed * here_s)

    def _table(self, rank: int) -> SpeedTable:
        points = self._points[rank]
        table = [(size, 1.0 / each_s) for size, each_s in points]
        if rank not in self._given:
            steps = [
                (low, high_s) for (low, low_s), (high, high_s) in pairwise(points) if high_s > low_s and high > _STEP * low
            ]
            table += [(_STEP * size, 1.0 / each_s) for size, each_s in steps]
        return SpeedTable(table)

    def scale(self, rank: int, factor: float) -> None:
        """The processor became slower by about this factor, at every size; how slow it is now is measured next."""
        self._unmeasured.add(rank)
        self._points[rank] = [(work, per_work_s * factor) for work, per_work_s in self._points[rank]]
