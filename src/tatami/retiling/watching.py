"""Look at every iteration, and move when it pays. The state machine of `Retiler()`: timings in, decisions out.

1. *Notice*: the compute time per work of every processor is watched by `tatami.retiling.noticing`. An alarm says which one
   changed, since when, and how fast it is now. Without an alarm a level follows slow drifts by itself.
2. *Weigh*: `tatami.retiling.levels` says what an iteration takes as the tiles lie, what it would take after moving little or
   much, and what moving costs. A gain counts from `CERTAINTY` standard errors of the slowest processor's speed on, so that
   noise alone moves nothing.
3. *Pay*: each thing that could be done has an account (`tatami.retiling.rental`). It is done before the loss since the change
   would exceed its price: at most twice the cost of an oracle that knows how long the change lasts.

Forecasts may be wrong: times that do not grow with the area, ranks that share a core. `tatami.retiling.sizes` learns from each
re-tiling how a processor's speed goes with the size of its tile; and where a move did not bring half of what was promised, the
next must be worth four times its price, and so on until one does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import numpy as np

from tatami.cluster import Cluster, SpeedTable, speed_at
from tatami.retiling.alarms import Alarm, Glance, tell_alarm
from tatami.retiling.columns import works_of
from tatami.retiling.deciding import AbstractDecider
from tatami.retiling.decision import Decision, DecisionKind, tell_speeds
from tatami.retiling.levels import Level, iteration_s, levels
from tatami.retiling.link_watch import LinkWatch
from tatami.retiling.moves import moves
from tatami.retiling.noticing import Detector, Vector
from tatami.retiling.rental import Rental, expected_rest
from tatami.retiling.retiler import Retiler
from tatami.retiling.situation import SIGNALS, Situation
from tatami.retiling.sizes import SizedTimes
from tatami.retiling.timing import Timing
from tatami.tiling import AbstractCost, Layout
from tatami.workload import Workload

CERTAINTY = 4.0
"""Standard errors of a speed: a gain that is less is not believed."""
LEAST_GAIN = 0.03
"""Of an iteration. What is less is not worth the talk."""
FIXED_S = 0.005
"""What a re-tiling costs beside its rows until one was measured: its planning, its agreement, buffers and groups."""
_LOOK = 32
"""Iterations after which drifts are looked at."""
_LOOK_AT = (4, 8, 16, 32, 64)
"""Iterations since the last alarm or re-tiling at which the speeds are looked at, too: as their errors shrink, gains show."""
_ENOUGH = 8
"""Samples under the tiles of now that replace what was known of a processor before."""
_MOST_KEPT = 4096


@final
class Watcher(AbstractDecider):
    """Decides after every iteration.

    Attributes:
        alarms: all so far.
        links: between columns, which are watched as well.
        glances: the last few thousand looks.
    """

    def __init__(
        self,
        retiler: Retiler,
        *,
        cluster: Cluster,
        workload: Workload,
        layout: Layout,
        known_speeds: bool = False,
        cost: AbstractCost | None = None,
    ) -> None:
        """Start from `layout`; arguments as of `AbstractDecider`."""
        super().__init__(retiler, cluster=cluster, workload=workload, layout=layout, known_speeds=known_speeds, cost=cost)
        self.alarms: list[Alarm] = []
        self.glances: deque[Glance] = deque(maxlen=_MOST_KEPT)
        self.links = LinkWatch(cluster, workload=workload)
        self._rank_of = cluster.rank_of
        self._detector = Detector((cluster.size,))
        self._sizes = SizedTimes(cluster.size, given=_in_work(cluster, workload=workload))
        self._works: Vector = np.zeros(cluster.size)
        self._sized_at: Vector = np.full(cluster.size, workload.samples * workload.units / cluster.size)
        self._lie()
        self._last: Vector = np.full(cluster.size, np.nan)
        self._accounts: dict[DecisionKind, Rental] = {}
        self._levels: tuple[Level, ...] = ()
        self._stay_s = 0.0
        self._since = 0
        self._slow_since: dict[str, tuple[int, float]] = {}
        self._lengths: list[int] = []
        self._change_at = 0
        self._promise: tuple[float, float] | None = None
        self._distrust = 1.0
        self._fixed_s = FIXED_S
        self._predicted_move_s = 0.0
        self._decisions = 0

    @property
    def works(self) -> dict[str, float]:
        """`Workload.tile_work` of every processor that has a tile."""
        return works_of(self.layout, workload=self.workload)

    def per_work_s(self, processor: str) -> float:
        """Seconds per work of a processor, as last known; NaN where it never was."""
        return float(self._last[self._rank_of[processor]])

    def moved(self, took_s: float) -> None:
        """The last re-tiling took the slowest rank so long; what it cost beside its rows is the next one's too."""
        self._fixed_s = max(0.0, took_s - self._predicted_move_s)

    def observe(self, iteration: int, timings: Iterable[Timing]) -> Decision | None:
        values = np.full(self.cluster.size, np.nan)
        for timing in timings:
            self._check_known(timing)
            if timing.work > 0:
                values[self._rank_of[timing.processor]] = timing.compute_s / timing.work
        return self.take(iteration, values)

    def take(self, iteration: int, values: Vector, *, late_s: Sequence[float] = ()) -> Decision | None:
        """As `observe`, of numbers.

        Args:
            iteration: as there.
            values: seconds per work in the order of the cluster; NaN or 0 where there is none.
            late_s: of each of `links.messages`, how long it took; 0 or less where that is not known.
        """
        before = self._detector.level.copy()
        changed = self._detector.step(values)
        fresh: list[Alarm] = []
        if changed.any():
            fresh = self._note(iteration, np.flatnonzero(changed), before)
        fresh += self._note_links(iteration, late_s)
        since = iteration - max(self._since, self._change_at - 1)
        if fresh or since in _LOOK_AT:
            self._look(iteration, lost=since)
        elif since % _LOOK == 0 and self._drifted():
            self._look(iteration, lost=0)
        chosen = self._choose(iteration)
        if chosen is None:
            for level in self._levels:
                self._accounts[level.kind].lose(self._stay_s - level.iteration_s)
            if self._levels:
                self._glances_on(iteration)
            return self._decide(iteration, None, fresh) if fresh else None
        return self._decide(iteration, chosen, fresh)

    def _drifted(self) -> bool:
        """Whether a level has gone so far since the last look that there may be something to gain."""
        detector = self._detector
        known = np.isfinite(self._last) & (detector.count > 0)
        drift = np.abs(detector.level - self._last) > np.maximum(LEAST_GAIN / 2, 2 * detector.error) * self._last
        return bool((drift & known).any() or not np.isfinite(self._last).any())

    def _note(self, iteration: int, ranks: Iterable[int], before: Vector) -> list[Alarm]:
        fresh = []
        names = list(self.cluster.by_name)
        for rank in ranks:
            count = int(self._detector.count[rank])
            alarm = Alarm(
                processor=names[rank],
                iteration=iteration,
                began=iteration - count + 1,
                before_s=float(before[rank]),
                after_s=float(self._detector.level[rank]),
                error=float(self._detector.error[rank]),
            )
            fresh.append(alarm)
            self._sizes.scale(rank, alarm.slower)
            self._remember(alarm)
        return fresh

    def _note_links(self, iteration: int, late_s: Sequence[float]) -> list[Alarm]:
        fresh = [
            Alarm(
                processor="",
                link=change.hosts,
                iteration=iteration,
                began=iteration - change.count + 1,
                before_s=change.before,
                after_s=change.after,
                error=change.error,
            )
            for change in self.links.take(late_s)
        ]
        for alarm in fresh:
            self._remember(alarm)
        return fresh

    def _remember(self, alarm: Alarm) -> None:
        self._change_at = alarm.began
        # A change lasts until what changed is nearer to what it was than to what it became.
        began, usual_s = self._slow_since.pop(alarm.name, (alarm.began, alarm.before_s))
        if began < alarm.began and abs(alarm.after_s - usual_s) < abs(alarm.after_s - alarm.before_s):
            self._lengths.append(alarm.began - began)
        else:
            self._slow_since[alarm.name] = (began, usual_s)
        # What the last move brought can no longer be told from what this change took.
        self._promise = None
        self.alarms.append(alarm)

    def _situation(self) -> Situation:
        return Situation(
            retiler=self.retiler,
            cluster=self.links.cluster,
            workload=self.workload,
            layout=self.layout,
            recent={},
            kept={},
            last={signal: {} for signal in SIGNALS},
            first=False,
            streak=0,
            cost=self._cost,
            slow_hosts=self.links.slow_hosts,
        )

    def _speeds(self) -> dict[str, float]:
        """Work per second of every processor, as well as it is known."""
        detector = self._detector
        enough = (detector.count >= _ENOUGH) | ((detector.count > 0) & (self._since == 0)) | ~np.isfinite(self._last)
        enough |= (detector.count > 0) & (detector.count < detector.count.max())
        self._last = np.where(enough & np.isfinite(detector.level), detector.level, self._last)
        given = np.array(
            [speed_at(speed, work) for speed, work in zip(self.cluster.speeds.values(), self._flop(), strict=True)]
        )
        speeds = 1.0 / self._last
        known = np.isfinite(speeds)
        scale = np.sort((speeds / given)[known])[known.sum() // 2] if known.any() else 1.0
        found = np.where(known, speeds, given * scale)
        return dict(zip(self.cluster.by_name, map(float, found), strict=True))

    def _flop(self) -> Iterable[float]:
        """Of every processor's tile; of its last one where it has none."""
        return map(float, self._sized_at * self.workload.work_flop)

    def _by_size(self, speeds: Mapping[str, float]) -> dict[str, float]:
        """The same as functions of the size of the tile, where they are known to depend on it."""
        return {
            name: self._sizes.speed(rank, work=float(self._sized_at[rank]), speed=speeds[name])
            for name, rank in self._rank_of.items()
        }

    def _learn_sizes(self) -> None:
        """What the tiles as they lie have shown."""
        detector = self._detector
        for rank in map(int, np.flatnonzero(detector.count >= _ENOUGH)):
            level_s, error = float(detector.level[rank]), float(detector.error[rank])
            if self._works[rank] > 0:
                self._sizes.learn(rank, work=float(self._works[rank]), per_work_s=level_s, error=error)

    def _lie(self) -> None:
        """Take note of the tiles as they lie."""
        works = self.works
        self._works = np.array([works.get(name, 0.0) for name in self.cluster.by_name])
        self._sized_at = np.where(self._works > 0, self._works, self._sized_at)
        self.links.lie(self.layout)

    def _look(self, iteration: int, *, lost: int) -> None:
        """Weigh again. `lost` iterations have gone by as the last of them."""
        detector = self._detector
        placed = [self._rank_of[name] for name in self.layout.processors]
        errors = detector.error[placed]
        if not np.isfinite(errors[detector.count[placed] > 0]).all() or not detector.count[placed].any():
            return
        self._learn_sizes()
        speeds = self._speeds()
        situation = self._situation()
        old = {level.kind: level for level in self._levels}
        was_s = self._stay_s
        self._stay_s, found = levels(situation, self._by_size(speeds), fixed_s=self._fixed_s)
        self._settle_promise(speeds, situation)
        error = float(np.nanmax(errors))
        least_s = max(LEAST_GAIN, CERTAINTY * error) * self._stay_s
        self._levels = tuple(level for level in found if self._stay_s - level.iteration_s > least_s)
        kinds = {level.kind for level in self._levels}
        for kind, account in self._accounts.items():
            if kind not in kinds and account.loss_s:
                account.ended(old[kind].price_s if kind in old else account.loss_s)
        for level in self._levels:
            account = self._accounts.setdefault(level.kind, Rental())
            rate_s = self._stay_s - level.iteration_s
            counted_s = was_s - old[level.kind].iteration_s if level.kind in old else 0.0
            # What an iteration has cost since the change began is known only now.
            account.lose(lost * max(0.0, rate_s - counted_s))
        self._glance(iteration, speeds)

    def _settle_promise(self, speeds: Mapping[str, float], situation: Situation) -> None:
        """Whether the last move brought what it promised, as far as it is known by now."""
        if self._promise is None or self._detector.count.max() < _ENOUGH:
            return
        gain_s, before_s = self._promise
        self._promise = None
        held = before_s - iteration_s(self.layout, situation=situation, speeds=speeds) >= gain_s / 2
        self._distrust = max(1.0, self._distrust / 2) if held else 4 * self._distrust

    def _choose(self, iteration: int) -> Level | None:
        """The fastest of what is due."""
        rest = expected_rest(self._lengths, lasted=max(0, iteration - self._change_at))
        due = [
            level
            for level in self._levels
            if self._accounts[level.kind].due(
                self._distrust * level.price_s, rate_s=self._stay_s - level.iteration_s, rest=rest
            )
        ]
        return min(due, key=lambda level: level.iteration_s, default=None)

    def _decide(self, iteration: int, chosen: Level | None, fresh: list[Alarm]) -> Decision:
        self._decisions += 1
        speeds = self._speeds()
        situation = self._situation()
        old = self.tiling
        told = "; ".join(tell_alarm(alarm) for alarm in fresh)
        ratio = situation.forecast(self.layout, speeds).ratio
        if chosen is None:
            best = min(self._levels, key=lambda level: level.iteration_s, default=None)
            told += ": " + (
                "nothing to gain"
                if best is None
                else f"{1e3 * (self._stay_s - best.iteration_s):.3g} ms an iteration lost, "
                f"{1e3 * self._accounts[best.kind].loss_s:.3g} ms of {1e3 * best.price_s:.3g} so far"
            )
            layout, new, kind = self.layout, old, DecisionKind.KEEP
        else:
            account = self._accounts[chosen.kind]
            rate_s = self._stay_s - chosen.iteration_s
            layout, kind = chosen.layout, chosen.kind
            new = layout.cut(samples=old.samples, units=old.units)
            moved = sum(move.units.size for move in moves(old, new))
            told = f"{told}; " if told else ""
            told += (
                f"{1e3 * rate_s:.3g} of {1e3 * self._stay_s:.3g} ms an iteration, {1e3 * account.loss_s:.3g} ms so far, lost; "
                f"moving costs {1e3 * chosen.price_s:.3g} ms; speeds {tell_speeds(speeds)}; {moved} unit rows move"
            )
            self._predicted_move_s = chosen.price_s - self._fixed_s
            self._glance(iteration, speeds)
            account.moved(chosen.price_s, rate_s=rate_s)
            self._leave(iteration, chosen)
        return Decision(
            kind=kind,
            check=self._decisions,
            iteration=iteration,
            layout=layout,
            tiling=new,
            speeds=speeds,
            ratio=ratio,
            predicted=situation.forecast(layout, speeds).ratio,
            reason=f"iteration {iteration}: {told}: {kind.value}",
        )

    def _leave(self, iteration: int, chosen: Level) -> None:
        """From now on the tiles lie otherwise."""
        self._learn_sizes()
        self._promise = (self._stay_s - chosen.iteration_s, self._stay_s)
        for account in self._accounts.values():
            account.loss_s = 0.0
        self._levels = ()
        self.layout = chosen.layout
        self._lie()
        self._since = iteration
        self._detector.restart()

    def _glances_on(self, iteration: int) -> None:
        """The accounts between two looks; speeds as at the last one."""
        last = self.glances[-1].speeds
        self._glance(iteration, dict(zip(self.cluster.by_name, last, strict=True)))

    def _glance(self, iteration: int, speeds: Mapping[str, float]) -> None:
        self.glances.append(
            Glance(
                iteration=iteration,
                speeds=tuple(speeds.values()),
                loss_s={level.kind: self._accounts[level.kind].loss_s for level in self._levels},
                price_s={level.kind: level.price_s for level in self._levels},
            )
        )


def _in_work(cluster: Cluster, *, workload: Workload) -> dict[int, SpeedTable]:
    """The speeds that depend on the size of the tile, by rank, in units of work."""
    scale = 1.0 / workload.work_flop
    return {
        rank: each.speed.scaled(size=scale, speed=scale)
        for rank, each in enumerate(cluster.processors)
        if isinstance(each.speed, SpeedTable)
    }
