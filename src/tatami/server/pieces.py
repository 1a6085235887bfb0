"""Long vectors in pieces: cut for the shards, and never put together where a view will do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from tatami.server.optimizers import Vector

_SMALL_BYTES = 1 << 20
"""Up to here one copy is cheaper than the care for many pieces."""


def cut(size: int, *, shards: int) -> list[slice]:
    """Stretches of a vector of `size` elements. Their lengths differ by at most one: a large tensor is divided."""
    bounds = [size * shard // shards for shard in range(shards + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def views(pieces: Sequence[Vector], *, start: int, stop: int) -> Iterator[Vector]:
    """Views that hold elements `start` to `stop` of the pieces, each (elements,), taken one after the other."""
    offset = 0
    for piece in pieces:
        low, high = max(start - offset, 0), min(stop - offset, len(piece))
        if low < high:
            yield piece[low:high]
        offset += len(piece)
        if offset >= stop:
            return


def walk(pieces: Sequence[Vector], *, step: int) -> Iterator[list[Vector]]:
    """The same views for one stretch of `step` elements after the other; the last may be shorter."""
    found: list[Vector] = []
    missing = step
    for piece in pieces:
        offset = 0
        while offset < len(piece):
            view = piece[offset : offset + missing]
            found.append(view)
            offset, missing = offset + len(view), missing - len(view)
            if not missing:
                yield found
                found, missing = [], step
    if found:
        yield found


def parcel(pieces: Sequence[Vector], *, stretch: slice) -> list[Vector]:
    """What a shard is sent of a vector: views, which the object store copies once; one array where they are small."""
    parts = list(views(pieces, start=stretch.start, stop=stretch.stop))
    if len(parts) > 1 and sum(part.nbytes for part in parts) <= _SMALL_BYTES:
        return [np.concatenate(parts)]
    return parts
