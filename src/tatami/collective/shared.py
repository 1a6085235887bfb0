"""The shared window: ranks of one host reduce straight from their neighbours' memory.

Nothing is sent. Rank i reads part i of all ranks' vectors, sums, and stores the result into all of them: two barriers and one
pass over memory, the limit of what one-sided communication can be inside a host.
"""

from __future__ import annotations

from collections.abc import Sequence

from tatami.collective.direct import DirectAllGather, DirectReduceScatter, SharedAllReduce
from tatami.collective.halves import Halves, among_all
from tatami.collective.schedule import Schedule, check_problem
from tatami.collective.step import Sync, Via
from tatami.errors import ScheduleError

SHARED_ORDER = "part j of k: rank j first, then j + 1, ... around to j - 1"

SHARED_HALVES = Halves(
    scatter=DirectReduceScatter(via=Via.LOAD),
    scatter_sync=Sync.BARRIER,
    gather=DirectAllGather(via=Via.LOAD),
    gather_sync=Sync.BARRIER,
    order=SHARED_ORDER,
    fixed_order=True,
)
"""Inside a host, with something else between the halves: `hierarchical`."""


def shared(ranks: int, size: int, *, hosts: Sequence[str] | None = None) -> Schedule:
    """All ranks in one host's shared window. Order of the sum: `SHARED_ORDER`, fixed.

    Args:
        ranks: P.
        size: elements.
        hosts: the host of each rank; None: they share one.

    Raises:
        ScheduleError: the ranks are on more than one host.
    """
    check_problem(ranks, size)
    if hosts is not None and len(set(hosts)) > 1:
        raise ScheduleError(
            f"shared needs all ranks on one host, and these are on {len(set(hosts))}: {', '.join(sorted(set(hosts))[:4])}; "
            "use hierarchical, which shares a window inside each host"
        )
    phase = (SharedAllReduce(), Sync.BARRIER)
    return among_all("shared", phase, ranks=ranks, size=size, order=SHARED_ORDER, fixed_order=True)
