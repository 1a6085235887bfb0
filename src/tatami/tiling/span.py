"""Half-open integer intervals, and the one rule by which real shares become them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tatami.errors import PlanError

FEW = 8
"""Where there are fewer for each share on average, one more is so much that the largest remainder is not good enough."""
_ROUNDING = 1e-9
_MANY = 200
"""Shares for which arrays are quicker than lists."""
_MOVES = 8
"""So many of each replica are made in all replicas at once; few replicas need more."""


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
    sizes = largest_remainder(shares, total=total)
    return _evened(sizes, shares) if 0 < total < FEW * len(shares) else sizes


def _evened(found: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    sizes = list(found)
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


def whole_shares_of(replicas: Sequence[Sequence[float]], *, total: int) -> list[tuple[int, ...]]:
    """`whole_shares` of each of `replicas`, the same integers: all at once, because there may be thousands."""
    counts = np.array([len(shares) for shares in replicas])
    scales = np.array([sum(shares) for shares in replicas])
    if counts.sum() < _MANY or not (np.all((scales > 0) & np.isfinite(scales)) and min(map(min, replicas)) >= 0):
        return [whole_shares(shares, total=total) for shares in replicas]
    shares = np.fromiter(chain.from_iterable(replicas), dtype=np.float64, count=counts.sum())
    starts = np.cumsum(counts) - counts
    replica = np.repeat(np.arange(len(counts)), counts)
    ideal = total * shares / scales[replica]
    sizes = (ideal + 1e-9).astype(np.int64)
    left = total - np.add.reduceat(sizes, starts)
    order = np.lexsort((sizes - ideal, replica))  # replica by replica, of equals the earlier share first
    sizes[order[np.arange(len(shares)) - starts[replica] < left[replica]]] += 1
    few = (total < FEW * counts)[replica] & (shares > 0) if total else np.zeros(len(shares), dtype=bool)
    uneven = _evened_together(sizes, shares, replica, np.flatnonzero(few))
    listed = sizes.tolist()
    found = [tuple(listed[start : start + count]) for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]
    for index in uneven:
        found[index] = _evened(found[index], replicas[index])
    return found


def _evened_together(
    sizes: NDArray[np.int64], shares: NDArray[np.float64], replica: NDArray[np.int64], going: NDArray[np.int64]
) -> list[int]:
    """Make the first `_MOVES` moves of `_evened` in `sizes`, of the shares at `going`; the replicas that may need more."""
    for _ in range(_MOVES):
        if not len(going):
            break
        starts = np.flatnonzero(np.diff(replica[going], prepend=-1))
        own = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(going)))
        # Of equals the earlier share, as a heap of (load, index) has it.
        load, then = sizes[going] / shares[going], (sizes[going] + 1) / shares[going]
        most, least = np.maximum.reduceat(load, starts), np.minimum.reduceat(then, starts)
        moves = least < most * (1 - _ROUNDING)
        places = np.arange(len(going))
        givers = np.minimum.reduceat(np.where(load == most[own], places, len(going)), starts)[moves]
        takers = np.minimum.reduceat(np.where(then == least[own], places, len(going)), starts)[moves]
        sizes[going[givers]] -= 1
        sizes[going[takers]] += 1
        going = going[moves[own]]
    return sorted(set(replica[going].tolist()))


def micro_batch_sizes(samples: int, *, number: int) -> tuple[int, ...]:
    """The samples of each of `number` micro-batches, as equal as possible: at least one micro-batch, and no empty one beside
    it."""
    number = max(1, min(number, samples))
    size, larger = divmod(samples, number)
    return (size + 1,) * larger + (size,) * (number - larger)


def spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Consecutive spans of the given sizes, from 0."""
    result = []
    start = 0
    for size in sizes:
        result.append(Span(start, start + size))
        start += size
    return tuple(result)
