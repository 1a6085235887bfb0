"""The last phase of the torus alone: a message gathered by puts, and by all-gather (Tamura, Hanawa, Fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping

from tatami.collective import AbstractPattern, Native, Phase, RankGroup, Role, Schedule, Sync, Via
from tatami.collective.halving import Doubling
from tatami.errors import InputError

ALL_GATHER = "allgather"
_PUTS = {f"put-{sync.value}": sync for sync in Sync if sync.one_sided}
WAYS = (ALL_GATHER, *_PUTS)
"""As `tatami bench put-vs-allgather` calls them."""


def gather_schedule(way: str, *, ranks: int, size: int) -> Schedule:
    """All ranks in one row gather a message of `size` elements, each its own part at first.

    No all-reduce: it ends with what each rank had in its part, everywhere.

    Raises:
        InputError: an unknown way, or fewer than 2 ranks.
    """
    if way not in WAYS:
        raise InputError(f"there is no way {way!r} to gather; choose of: {', '.join(WAYS)}")
    if ranks < 2:
        raise InputError(f"put and all-gather are between ranks: at least 2, not {ranks}")
    what: AbstractPattern | Native = Native(role=Role.ALL_GATHER) if way == ALL_GATHER else Doubling(via=Via.PUT)
    group = RankGroup(ranks=tuple(range(ranks)), start=0, stop=size)
    return Schedule(
        algorithm=way,
        ranks=ranks,
        size=size,
        phases=(Phase(groups=(group,), what=what, sync=_PUTS.get(way, Sync.ARRIVAL)),),
        order="nothing is summed",
        fixed_order=True,
    )


def crossover_bytes(seconds: Mapping[tuple[str, int], float], *, way: str) -> int | None:
    """The smallest size from which on `way` is faster than all-gather at every size; None where it is not at the largest.

    Args:
        seconds: by way and size in bytes.
        way: one of the puts.
    """
    crossed = None
    for size_bytes in sorted({size_bytes for _, size_bytes in seconds}, reverse=True):
        if seconds[way, size_bytes] >= seconds[ALL_GATHER, size_bytes]:
            break
        crossed = size_bytes
    return crossed
