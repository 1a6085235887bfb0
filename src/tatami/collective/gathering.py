"""The last phase of the torus alone: a message gathered by puts, by loads, and by all-gather (Tamura, Hanawa, Fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping

from tatami.collective.direct import DirectAllGather
from tatami.collective.halving import Doubling
from tatami.collective.pattern import AbstractPattern, Native
from tatami.collective.schedule import Phase, Schedule
from tatami.collective.step import RankGroup, Role, Sync, Via
from tatami.errors import InputError

ALL_GATHER, SHARED = "allgather", "shared"
PUTS = {f"put-{sync.value}": sync for sync in Sync if sync.one_sided}
_WAYS: Mapping[str, tuple[AbstractPattern | Native, Sync]] = {
    ALL_GATHER: (Native(role=Role.ALL_GATHER), Sync.ARRIVAL),
    **{way: (Doubling(via=Via.PUT), sync) for way, sync in PUTS.items()},
    SHARED: (DirectAllGather(via=Via.LOAD), Sync.BARRIER),
}


def gather_schedule(way: str, *, ranks: int, size: int) -> Schedule:
    """All ranks in one row gather a message of `size` elements, each its own part at first.

    No all-reduce: it ends with what each rank had in its part, everywhere.

    Args:
        way: `allgather`; `put-fence`, `put-pscw` or `put-lock` (recursive doubling); `shared` (loads), for ranks of one host.
        ranks: how many there are.
        size: elements of the gathered message.

    Raises:
        InputError: an unknown way, or fewer than 2 ranks.
    """
    if way not in _WAYS:
        raise InputError(f"there is no way {way!r} to gather; choose one of: {', '.join(_WAYS)}")
    if ranks < 2:
        raise InputError(f"put and all-gather are between ranks: at least 2, not {ranks}")
    what, sync = _WAYS[way]
    group = RankGroup(ranks=tuple(range(ranks)), start=0, stop=size)
    return Schedule(
        algorithm=way,
        ranks=ranks,
        size=size,
        phases=(Phase(groups=(group,), what=what, sync=sync),),
        order="nothing is summed",
        fixed_order=True,
    )


def crossover_bytes(seconds: Mapping[tuple[str, int], float], *, way: str) -> int | None:
    """The smallest size from which on `way` is faster than all-gather at every size; None where it is not at the largest.

    Args:
        seconds: by way and size in bytes.
        way: one of `PUTS`.
    """
    crossed = None
    for size_bytes in sorted({size_bytes for _, size_bytes in seconds}, reverse=True):
        if seconds[way, size_bytes] >= seconds[ALL_GATHER, size_bytes]:
            break
        crossed = size_bytes
    return crossed
