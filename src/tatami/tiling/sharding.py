"""Who updates which weights, where each rank keeps the optimizer's state of its shard alone (ZeRO). Pure.

All weights are one row of elements, cut at one place between two ranks: a rank's shard is a range of it, and any weight may be
cut anywhere. A weight that is trained later on is cut by the same shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

ROUND_BYTES = 4 << 20
MOST_ROUNDS = 32
"""Most rounds: those of larger networks grow, or there would be many small messages."""
Ranges = tuple[tuple[int, int], ...]
"""For each rank, the first element of a weight that it updates, and the one after the last."""
Slices = tuple[tuple[int, int, int], ...]
"""Ranges of elements: the number of the weight, the first element, and the one after the last."""


def shard_shares(speeds: Sequence[float], *, rooms_bytes: Sequence[float], size_bytes: float) -> tuple[float, ...]:
    """The share of every rank: in proportion to speed, as far as memory allows.

    Args:
        speeds: only their ratios count.
        rooms_bytes: the memory that each rank has left for its shard; infinite where that is not known.
        size_bytes: of the whole optimizer state.

    Returns:
        Shares that sum to 1. Where the rooms together are too small, they are in proportion to the rooms.
    """
    most = [max(0.0, room) / size_bytes if size_bytes else 1.0 for room in rooms_bytes]
    if sum(most) < 1:
        return tuple(each / sum(most) for each in most) if sum(most) else (1 / len(most),) * len(most)
    shares = [0.0] * len(speeds)
    free = set(range(len(speeds)))
    left = 1.0
    while True:
        total = sum(speeds[rank] for rank in free)
        full = [rank for rank in free if left * speeds[rank] > most[rank] * total]
        for rank in full or free:
            shares[rank] = most[rank] if full else left * speeds[rank] / total
        if not full:
            return tuple(shares)
        free.difference_update(full)
        left = 1.0 - sum(shares)
        if not free or left <= 0:
            return tuple(each / sum(shares) for each in shares)


def with_even_part(shares: Sequence[float], fraction: float) -> tuple[float, ...]:
    """The same shares as nearly as can be, where every rank has an equal share of a `fraction` of the weights."""
    even = fraction / len(shares)
    rest = [max(0.0, share - even) for share in shares]
    left = sum(rest)
    return tuple(even + (1 - fraction) * (own / left if left else 1 / len(rest)) for own in rest)


def shard_bounds(sizes: Sequence[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Where each weight is cut: rank r has the elements `bounds[r]` to `bounds[r + 1]` of it.

    Args:
        sizes: the number of elements of each weight.
        shares: of every rank; they sum to 1.
    """
    total = sum(sizes)
    cuts = [min(total, round(total * share)) for share in accumulate(shares, initial=0.0)]
    cuts[-1] = total
    starts = accumulate(sizes, initial=0)
    return [tuple(min(max(cut - start, 0), size) for cut in cuts) for start, size in zip(starts, sizes, strict=False)]


def num_rounds(size_bytes: float) -> int:
    """In how many rounds weights of so many bytes are exchanged."""
    return max(1, min(MOST_ROUNDS, round(size_bytes / ROUND_BYTES)))


def rounds_of(ranges: Sequence[Ranges], *, rounds: int) -> list[tuple[Slices, ...]]:
    """The shards in rounds, in each of which every rank sends and receives about as much: of each round, the slices by owner.

    Args:
        ranges: who updates what of every weight.
        rounds: how many.
    """
    ranks = len(ranges[0]) if ranges else 0
    by_owner = []
    for rank in range(ranks):
        own = [(index, *each[rank]) for index, each in enumerate(ranges)]
        starts = list(accumulate((stop - start for _, start, stop in own), initial=0))
        edges = [starts[-1] * number // rounds for number in range(rounds + 1)]
        by_owner.append([_cut(own, starts, first, last) for first, last in pairwise(edges)])
    return list(zip(*by_owner, strict=True))


def _cut(own: Sequence[tuple[int, int, int]], starts: Sequence[int], first: int, last: int) -> Slices:
    """The elements `first` to `last` of slices that are put in a row, the first element of each being at `starts`."""
    found = []
    for (index, start, stop), at in zip(own, starts, strict=False):
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            found.append((index, start + low, start + high))
    return tuple(found)
