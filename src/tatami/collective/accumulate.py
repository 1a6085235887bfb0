"""All-reduce from one-sided operations alone: reduce-scatter by accumulate, all-gather by put.

No rank receives anything: each adds its elements into the windows of the ranks that complete them, one transfer for each peer,
and the completed parts are put back at their final addresses by recursive doubling.
"""

from __future__ import annotations

from tatami.collective.direct import DirectReduceScatter
from tatami.collective.halves import Halves, flat
from tatami.collective.halving import Doubling
from tatami.collective.schedule import Schedule
from tatami.collective.step import Sync, Via
from tatami.errors import ScheduleError


def accumulate(ranks: int, size: int, *, sync: Sync = Sync.PSCW, fixed_order: bool = False) -> Schedule:
    """One-sided reduce-scatter and all-gather over all ranks.

    Order of the sum: the order of arrival, which differs from run to run. With `fixed_order` part j is summed j, j + 1, ...
    around to j - 1, for the price of k - 1 epochs where there was one.

    Raises:
        ScheduleError: as `accumulate_halves`.
    """
    return flat("accumulate", accumulate_halves(sync=sync, fixed_order=fixed_order), ranks=ranks, size=size)


def accumulate_halves(*, sync: Sync = Sync.PSCW, fixed_order: bool = False) -> Halves:
    """Reduce-scatter by accumulate, all-gather by put.

    Raises:
        ScheduleError: a synchronisation that cannot order puts, or LOCK with a fixed order: under locks a fast rank's
            accumulate may come before a slow one's of an earlier round.
    """
    check_one_sided(sync, algorithm="accumulate")
    if fixed_order and sync is Sync.LOCK:
        raise ScheduleError(
            "accumulate cannot sum in a fixed order under sync='lock': nothing holds a later accumulate back. "
            "Use 'pscw' or 'fence', or give up fixed_order"
        )
    return Halves(
        scatter=DirectReduceScatter(via=Via.PUT, ordered=fixed_order),
        scatter_sync=sync,
        gather=Doubling(via=Via.PUT),
        gather_sync=sync,
        order="part j of k: rank j first, then j + 1, ... around to j - 1" if fixed_order else "as accumulates arrive",
        fixed_order=fixed_order,
    )


def check_one_sided(sync: Sync, *, algorithm: str) -> None:
    """Refuse a synchronisation that cannot order puts.

    Raises:
        ScheduleError: names those that can.
    """
    if not sync.one_sided:
        choices = ", ".join(repr(kind.value) for kind in Sync if kind.one_sided)
        raise ScheduleError(
            f"{algorithm} puts into windows, which sync={sync.value!r} does not synchronise; choose one of {choices}"
        )
