"""Who writes what: pieces of a state that several ranks have, shared out so that all write about as much. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def share_out(pieces: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """For each piece the rank that writes it: of those that have it, the one with least to write so far.

    Args:
        pieces: of each, its size, and the ranks that have it.
    """
    load: dict[int, int] = {}
    writers = [0] * len(pieces)
    # The largest first, or a late one would make one rank's load twice the others'.
    for index in sorted(range(len(pieces)), key=lambda index: (-pieces[index][0], index)):
        size, owners = pieces[index]
        writer = min(owners, key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + size
        writers[index] = writer
    return writers
