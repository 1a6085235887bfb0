"""Which ranks hold the same state, so that one of them keeps it for all."""

from __future__ import annotations

from collections.abc import Sequence

from tatami.errors import InputError

ReplicaSets = tuple[tuple[int, ...], ...]
"""Every rank in exactly one set; ranks ascend in each, and so do the first ranks of the sets."""


def parse_replica_sets(sets: Sequence[int | Sequence[int]] | None, *, ranks: int) -> ReplicaSets:
    """The sets in order, completed.

    Args:
        sets: ranks that hold the same state, or a single rank; those in none of them form one more set. `[]`: all ranks hold
            the same. None: each rank holds its own.
        ranks: how many there are.

    Raises:
        InputError: a set without ranks, a rank that is not there, or in two sets.
    """
    if sets is None:
        return tuple((rank,) for rank in range(ranks))
    seen: set[int] = set()
    parsed = []
    for given in sets:
        each = (given,) if isinstance(given, int) else tuple(given)
        if not each:
            raise InputError(f"replica_sets {list(sets)}: a set without ranks; leave it out")
        for rank in each:
            if not 0 <= rank < ranks:
                raise InputError(f"replica_sets: there is no rank {rank}; there are ranks 0 to {ranks - 1}")
            if rank in seen:
                raise InputError(f"replica_sets: rank {rank} is named twice; a rank is in one set")
            seen.add(rank)
        parsed.append(tuple(sorted(each)))
    rest = tuple(rank for rank in range(ranks) if rank not in seen)
    return tuple(sorted([*parsed, rest] if rest else parsed))


def set_of(rank: int, sets: ReplicaSets) -> int:
    """The number of the set that `rank` is in."""
    return next(number for number, each in enumerate(sets) if rank in each)
