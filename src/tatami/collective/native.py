"""The communicator's own all-reduce, and the two halves of it: what every other algorithm is measured against."""

from __future__ import annotations

from tatami.collective.halves import Halves, among_all
from tatami.collective.pattern import Native
from tatami.collective.schedule import Schedule
from tatami.collective.step import Role, Sync

ORDER = "as the communicator's library chooses, by size and ranks"

NATIVE_HALVES = Halves(
    scatter=Native(role=Role.REDUCE_SCATTER), gather=Native(role=Role.ALL_GATHER), order=ORDER, fixed_order=False
)


def native(ranks: int, size: int) -> Schedule:
    """One native all-reduce over all ranks.

    Order of the sum: the library's. Whether it is the same in every run is the library's promise, so none is made here.
    """
    phase = (Native(role=Role.ALL_REDUCE), Sync.ARRIVAL)
    return among_all("native", phase, ranks=ranks, size=size, order=ORDER, fixed_order=False)
