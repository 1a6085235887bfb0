"""Half-open integer intervals, and the one rule by which real shares become them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tatami.errors import PlanError

FEW = 8
"""Where there are fewer for each share on average, one more is so much that the largest remainder is not good enough."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The integers `start <= i < stop`, of samples or of units."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __and__(self, other: Span) -> Span:
        """The integers in both; empty (size 0) where they do not meet."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def slice(self) -> slice:
        return slice(self.start, self.stop)


def largest_remainder(shares: Sequence[float], *, total: int) -> tuple[int, ...]:
    """Integers in proportion to `shares` that sum to `total`: round down, then give what is left to the largest remainders.

    Ties go to the earlier share, so that every rank cuts alike.

    Raises:
        PlanError: a share that is negative or not finite, or none above 0.
    """
    scale = sum(shares)
    if not (math.isfinite(scale) and scale > 0 and min(shares) >= 0):
        raise PlanError(f"shares must be finite numbers >= 0 and not all 0, not {list(shares)}")
    ideal = [total * share / scale for share in shares]
    # 1e-9 below an integer is that integer: 0.35 * 100 is 35, not 34 and a large remainder.
    floor = [int(value + 1e-9) for value in ideal]
    left = total - sum(floor)
    order = sorted(range(len(shares)), key=lambda index: (floor[index] - ideal[index], index))
    for index in order[:left]:
        floor[index] += 1
    return tuple(floor)


def whole_shares(shares: Sequence[float], *, total: int) -> tuple[int, ...]:
    """Integers in proportion to `shares` that sum to `total`, as tiles are cut.

    By largest remainder; where there are fewer than `FEW` for each on average, one after the other then moves from where there
    is most for its share, until the largest ratio of integer to share is as small as it can be. Five heads over speeds 1, 1, 1,
    1 and 0.3: the largest remainder gives one to each, for which the last needs 3.3; with 2, 1, 1, 1 and 0 all is done in 2.
    """
    sizes = list(largest_remainder(shares, total=total))
    if not 0 < total < FEW * len(shares):
        return tuple(sizes)
    takers = [((size + 1) / share, index) for index, (size, share) in enumerate(zip(sizes, shares, strict=True)) if share]
    givers = [(-size / share, index) for index, (size, share) in enumerate(zip(sizes, shares, strict=True)) if size and share]
    heapq.heapify(takers)
    heapq.heapify(givers)
    while True:
        load, giver = givers[0]
        if -load != sizes[giver] / shares[giver]:  # from before it gave
            heapq.heappop(givers)
            continue
        then, taker = takers[0]
        if then >= -load * (1 - _ROUNDING):
            return tuple(sizes)
        sizes[giver] -= 1
        sizes[taker] += 1
        heapq.heapreplace(takers, ((sizes[taker] + 1) / shares[taker], taker))
        heapq.heappush(takers, ((sizes[giver] + 1) / shares[giver], giver))
        heapq.heappush(givers, (-sizes[taker] / shares[taker], taker))
        if sizes[giver]:
            heapq.heapreplace(givers, (-sizes[giver] / shares[giver], giver))


def spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Consecutive spans of the given sizes, from 0."""
    result = []
    start = 0
    for size in sizes:
        result.append(Span(start, start + size))
        start += size
    return tuple(result)
