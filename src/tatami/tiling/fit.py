"""A planner's layout made to fit: every processor in it has work, and no more to keep in memory than there is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf

from tatami.cluster import Cluster
from tatami.errors import MemoryLackError, PlanError
from tatami.tiling.cost import AbstractCost
from tatami.tiling.lack import lack_of_room, lack_of_size
from tatami.tiling.left_out import Fitted, Reason, least_bytes
from tatami.tiling.planner import AbstractPlanner, layout_of
from tatami.tiling.room import at_best_sizes, with_room
from tatami.tiling.taking_part import WORTH_PLANNING, QuickPrices, reason_for, subsets
from tatami.workload import Workload

_MOST_TRIED = 256
"""Most processors for which several other planners are asked whom they leave out."""
_MOST_PLANNED = 6
"""Sets of processors that are planned in full."""
_MOST_PLACED = 1024
"""Processors in all of them together, unless one alone has more."""
_MOST_REASONS = 16
"""Hosts for each of which the reason is looked for why its processors are left out; of more, for all together."""


def fit(
    planner: AbstractPlanner,
    *,
    cluster: Cluster,
    workload: Workload,
    cost: AbstractCost,
    chooses_machines: bool | None = None,
    idle: bool = False,
) -> Fitted:
    """What the planner says, where every processor has work, and memory for it.

    A planner that chooses among others (`AbstractPlanner.chooses_among`) also chooses who takes part, where seconds of
    computing and of communication compare (`AbstractCost.compares_machines`). Where speeds are relative they do not: all take
    part that can get work.

    Args:
        chooses_machines: whether processors that make an iteration longer are left out; None: where the cost compares them.
        idle: whether processors that are left out are in the run all the same, so that what they cost counts.

    Raises:
        MemoryLackError, PlanError: as `_held`.
    """
    if not planner.chooses_among:
        return _held(planner, cluster=cluster, workload=workload, cost=cost, ranks=cluster.size if idle else None)
    search = _Search(planner, cluster=cluster, workload=workload, cost=cost, idle=idle)
    if cost.compares_machines(cluster) if chooses_machines is None else chooses_machines:
        search.choose_machines()
    else:
        search.take_all()
        if search.best is None:
            search.choose_machines()
    return search.result()


class _Search:
    """The cheapest plan over any of the processors so far."""

    def __init__(
        self, planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost, idle: bool
    ) -> None:
        self._planner, self._cluster, self._workload, self._cost, self._idle = planner, cluster, workload, cost, idle
        self.best: Fitted | None = None
        self._least = inf
        self._lack: MemoryLackError | None = None
        self._planned: set[frozenset[str]] = set()

    def take_all(self) -> None:
        """Plan for all, and for those that other planners give work.

        Shares in proportion to speed may have nothing for the slowest, where equal ones would have all others wait for them, or
        no room beside them.
        """
        self._plan(self._cluster.by_name)
        others, ranks = self._planner.chooses_among, self._cluster.size if self._idle else None
        for other in others if self._cluster.size <= _MOST_TRIED else others[:1]:
            with suppress(MemoryLackError):
                fitted = _held(other, cluster=self._cluster, workload=self._workload, cost=self._cost, ranks=ranks)
                self._take(fitted)
                if fitted.reasons:
                    self._plan(fitted.layout.processors, reasons=fitted.reasons)

    def choose_machines(self) -> None:
        """Plan for the sets of processors that are cheapest by a quick price, and for all unless they are very many."""
        if self._cluster.size <= _MOST_TRIED and not self._planned:
            self.take_all()
        quick = QuickPrices(self._cluster, workload=self._workload, cost=self._cost, idle=self._idle)
        names = [each.name for each in self._cluster.processors]
        placed = planned = 0
        for chosen in subsets(quick, workload=self._workload):
            if planned == _MOST_PLANNED or quick.of(chosen) > WORTH_PLANNING * self._least:
                break
            if planned and placed + len(chosen) > _MOST_PLACED:
                continue
            placed, planned = placed + len(chosen), planned + 1
            self._plan([names[rank] for rank in chosen])
        if self.best is None and not self._planned:
            self.take_all()

    def result(self) -> Fitted:
        """The best plan, and why it leaves out whom it leaves out.

        Raises:
            MemoryLackError: there is none.
        """
        if self.best is None:
            assert self._lack is not None
            raise self._lack
        ranks = self._cluster.rank_of
        chosen = frozenset(ranks[name] for name in self.best.layout.processors)
        reasons = dict(self.best.reasons)
        rest = [each for each in self._cluster.processors if ranks[each.name] not in chosen and self._is_open(each.name)]
        rest.sort(key=lambda each: float(each.speed))
        hosts = list(dict.fromkeys(each.host for each in rest))
        for group in [hosts] if len(hosts) > _MOST_REASONS else [[host] for host in hosts]:
            gone = [each.name for each in rest if each.host in group]
            reason = reason_for(
                frozenset(map(ranks.__getitem__, gone)),
                chosen=chosen,
                depth=self.best.layout.deepest,
                cluster=self._cluster,
                workload=self._workload,
                cost=self._cost,
                idle=self._idle,
            )
            for name in gone:
                # Too little memory, or a slow link, is the reason rather than too little speed: with more it would have work.
                if name not in reasons or reason in (Reason.MEMORY, Reason.LINK, Reason.MESSAGES):
                    reasons[name] = reason
        return replace(self.best, reasons=reasons)

    def _is_open(self, name: str) -> bool:
        """Whether it is to be found out why a processor is left out."""
        assert self.best is not None
        known = self.best.reasons.get(name)
        return known is None or (known is Reason.NO_WORK and self._cluster.by_name[name].memory_bytes is not None)

    def _plan(self, names: Collection[str], *, reasons: Mapping[str, Reason] | None = None) -> None:
        """What the planner says of these processors."""
        if frozenset(names) in self._planned:
            return
        self._planned.add(frozenset(names))
        own = self._cluster.only(names)
        ranks = self._cluster.size if self._idle else None
        try:
            fitted = _held(self._planner, cluster=own, workload=self._workload, cost=self._cost, ranks=ranks)
        except MemoryLackError as error:
            self._lack = self._lack or error
            return
        self._take(replace(fitted, reasons={**(reasons or {}), **fitted.reasons}))

    def _take(self, fitted: Fitted) -> None:
        """Keep the cheapest; of equals, the first."""
        run = self._cluster if self._idle else self._cluster.only(fitted.layout.processors)
        price = self._cost.price(fitted.layout, cluster=run, workload=self._workload).total
        if price < self._least:
            self.best, self._least = fitted, price


def _held(
    planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost, ranks: int | None = None
) -> Fitted:
    """The planner's layout of all processors that have work and memory.

    Args:
        ranks: of the run; None: those that have a tile.

    Raises:
        MemoryLackError: the processors' memory does not hold the network, in any way that the planner knows.
        PlanError: the planner forgot a processor.
    """
    least = least_bytes(workload)
    small = [each.name for each in cluster.processors if each.memory_bytes is not None and each.memory_bytes < least]
    if len(small) == cluster.size:
        raise lack_of_size(cluster, workload=workload)
    reasons = dict.fromkeys(small, Reason.REPEATED)
    cluster = cluster.only(set(cluster.by_name).difference(small))
    while True:
        layout = layout_of(planner, cluster=cluster, workload=workload, cost=cost)
        if set(layout.processors) != set(cluster.by_name):
            differ = sorted(set(layout.processors) ^ set(cluster.by_name))
            raise PlanError(
                f"planner {planner.name!r} must lay out every processor of the cluster once; these differ: {differ}"
            )
        found = with_room(layout, cluster=cluster, workload=workload, cost=cost, ranks=ranks)
        if found is None:
            raise lack_of_room(planner, layout, cluster=cluster, workload=workload, ranks=ranks)
        empty = found.empty(workload)
        if not empty:
            found = at_best_sizes(found, cluster=cluster, workload=workload, cost=cost)
            return Fitted(layout=found, reasons=reasons)
        candidates = sorted((each for each in cluster.processors if each.name in empty), key=lambda each: each.speed)
        # Half of them at a time: ten thousand processors must not be planned ten thousand times.
        gone = [each.name for each in candidates[: (len(candidates) + 1) // 2]]
        reasons.update(dict.fromkeys(gone, Reason.NO_WORK))
        assert len(gone) < cluster.size, "one processor alone gets everything"
        cluster = cluster.only(set(cluster.by_name).difference(gone))
