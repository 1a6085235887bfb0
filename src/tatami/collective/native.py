"""The communicator's own all-reduce, and the two halves of it: what every other algorithm is measured against."""

from __future__ import annotations

from collections.abc import Sequence

from tatami.collective.halves import Halves
from tatami.collective.pattern import Native
from tatami.collective.schedule import Phase, Schedule, check_problem
from tatami.collective.step import RankGroup, Role

ORDER = "as the communicator's library chooses, by size and ranks"

NATIVE_HALVES = Halves(
    scatter=Native(role=Role.REDUCE_SCATTER), gather=Native(role=Role.ALL_GATHER), order=ORDER, fixed_order=False
)


def native(ranks: int, size: int) -> Schedule:
    """One native all-reduce over all ranks.

    Order of the sum: the library's. Whether it is the same in every run is the library's promise, so none is made here.
    """
    check_problem(ranks, size)
    everyone: Sequence[RankGroup] = (
        (RankGroup(ranks=tuple(range(ranks)), start=0, stop=size),) if ranks > 1 and size > 0 else ()
    )
    phases = tuple(Phase(groups=(group,), what=Native(role=Role.ALL_REDUCE)) for group in everyone)
    return Schedule(algorithm="native", ranks=ranks, size=size, phases=phases, order=ORDER, fixed_order=False)
