"""What a rule looks at when it decides: the layout in force, and what was measured under it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tatami.cluster import Cluster, SpeedTable, at_sizes
from tatami.errors import MemoryLackError
from tatami.retiling.ability import Balance, Point, balance, estimate
from tatami.retiling.replica_cuts import Forecast, forecast, recut, works_of
from tatami.retiling.retiler import Retiler
from tatami.retiling.timing import Timing
from tatami.tiling import AbstractPlanner, AlphaBetaCost, Layout, at_tiles, find_planner, with_speeds
from tatami.tiling.cost import RememberedCost
from tatami.tiling.fit import fit
from tatami.tiling.memory import lacking_bytes, squeezed
from tatami.tiling.speeds import at_paces
from tatami.workload import Workload

Signal = Literal["t1_s", "t2_s", "compute_s"]
"""Which of the measured times counts."""
SIGNALS: tuple[Signal, ...] = ("t1_s", "t2_s", "compute_s")

Window = Mapping[str, tuple[Timing, ...]]
"""Timings of each processor that has a tile, in the order of the iterations."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One check, before anything is decided.

    Attributes:
        cluster: all processors, at the speeds that the run started with.
        recent: the last L iterations, as far as they came after the last re-mapping.
        kept: the windows of the last few checks since the last re-mapping, `recent` among them.
        last: the last estimates, by signal and processor, of all that were ever measured.
        first: nothing is known yet: no speeds were given, and nothing was estimated before.
        streak: re-mappings since the balance was last good.
        slow_hosts: at the ends of links that became slower.
    """

    retiler: Retiler
    cluster: Cluster
    workload: Workload
    layout: Layout
    recent: Window = field(default_factory=dict)
    kept: Window = field(default_factory=dict)
    last: Mapping[Signal, Mapping[str, float]] = field(default_factory=lambda: {signal: {} for signal in SIGNALS})
    first: bool = False
    streak: int = 0
    slow_hosts: tuple[str, ...] = ()

    def balance(self, signal: Signal, *, window: Window) -> Balance | None:
        """How even `window` was."""
        return balance(points(window, signal))

    def speeds(self, signal: Signal, *, window: Window) -> dict[str, float]:
        """`Workload.tile_work` per second of every processor of the cluster."""
        return estimate(points(window, signal), last=self.last[signal], given=self.cluster.speeds)

    def whole(self, speeds: Mapping[str, float]) -> Layout:
        """The planner's layout at `speeds`. Costs in seconds want flop/s, which these are, however slow."""
        return self._planned(self.cluster, speeds)

    def without(self, name: str, speeds: Mapping[str, float]) -> Layout:
        """The planner's layout at `speeds` of all processors but this one."""
        others = tuple(processor for processor in self.cluster.processors if processor.name != name)
        return self._planned(replace(self.cluster, processors=others), {each.name: speeds[each.name] for each in others})

    def _planned(self, cluster: Cluster, speeds: Mapping[str, float]) -> Layout:
        flop = self.workload.work_flop
        planner = (
            self.retiler.planner if isinstance(self.retiler.planner, AbstractPlanner) else find_planner(self.retiler.planner)
        )
        if not planner.sized:
            speeds = at_sizes(speeds, works_of(self.layout, workload=self.workload))
        measured = {
            name: speed.scaled(size=flop, speed=flop) if isinstance(speed, SpeedTable) else speed * flop
            for name, speed in speeds.items()
        }
        try:
            # `plan` also prices and bounds what it found, and warns at every check of every rank.
            now = with_speeds(at_paces(cluster, self.paces(speeds)), measured)
            return fit(
                planner,
                cluster=now,
                workload=self.workload,
                cost=RememberedCost(AlphaBetaCost(flop_per_s=1.0)),
                # As the first plan did, which knew no seconds where speeds were relative.
                chooses_machines=AlphaBetaCost().compares_machines(self.cluster),
                idle=True,
            ).layout
        except MemoryLackError:
            return self.layout

    def paces(self, speeds: Mapping[str, float]) -> dict[str, float]:
        """How many times as fast each processor of `speeds` is as at first, if the one in the middle is as it was: what speeds
        count is not the same at first, where they may be relative, and later."""
        given = at_tiles(self.cluster, self.layout, workload=self.workload).speeds
        here = at_sizes(speeds, works_of(self.layout, workload=self.workload))
        ratios = {name: speed / given[name] for name, speed in here.items()}
        usual = sorted(ratios.values())[len(ratios) // 2]
        return {name: ratio / usual for name, ratio in ratios.items()}

    def replicas(self, speeds: Mapping[str, float]) -> Layout:
        """The layout in force with its cuts moved to `speeds`, as far as there is memory."""
        layout = recut(self.layout, speeds=speeds, units=self.workload.units)
        if lacking_bytes(layout, cluster=self.cluster, workload=self.workload):
            found = squeezed(layout, cluster=with_speeds(self.cluster, speeds), workload=self.workload)
            return self.layout if found is None or found.empty(self.workload) else found
        return layout

    def forecast(self, layout: Layout, speeds: Mapping[str, float]) -> Forecast:
        """Compute times of `layout` at `speeds`."""
        return forecast(layout, workload=self.workload, speeds=speeds)


def points(window: Window, signal: Signal) -> dict[str, tuple[Point, ...]]:
    """(seconds, work) of every iteration, by processor."""
    return {name: tuple((getattr(timing, signal), timing.work) for timing in own) for name, own in window.items()}
