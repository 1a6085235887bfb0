"""Look at every iteration, and move when it pays. The state machine of `Retiler()`: timings in, decisions out.

1. *Notice*: `tatami.retiling.estimates` watches the compute time per work of every processor, and the links. An alarm says
   which one changed, since when, and how fast it is now. Without an alarm a level follows slow drifts by itself.
2. *Weigh*: `tatami.retiling.options` says what an iteration takes as the tiles lie, what it would take after moving little or
   much, and what moving costs. A gain counts from `CERTAINTY` standard errors of the slowest processor's speed on, so that
   noise alone moves nothing.
3. *Pay*: each thing that could be done has an account (`tatami.retiling.ski_rental`). It is done before the loss since the
   change would exceed its price: at most twice the cost of an oracle that knows how long the change lasts.

As long as nothing is to be gained, an iteration costs one step of the estimates' arrays, and nothing is weighed.

Forecasts may be wrong: times that do not grow with the area, ranks that share a core. The estimates learn from each re-tiling
how a processor's speed goes with the size of its tile; and where a move did not bring half of what was promised, the next must
be worth four times its price, and so on until one does.

A processor that was left out looks now and then how fast it is, and is taken in again like any other gain. Where one is left
out a second time, or all but that (`ALL_BUT_OUT`), what its slowness cost until then is part of the price of its next return,
so that one which alternates costs at most about twice what it costs to do without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, final

import numpy as np

from tatami.retiling.alarms import Alarm, Glance, tell_alarm
from tatami.retiling.deciding import AbstractDecider
from tatami.retiling.decision import Decision, DecisionKind, tell_speeds
from tatami.retiling.estimates import Estimates
from tatami.retiling.link_watch import LinkWatch, WatchedMessage
from tatami.retiling.noticing import Vector
from tatami.retiling.options import Level, levels
from tatami.retiling.replica_cuts import works_of
from tatami.retiling.situation import Situation
from tatami.retiling.ski_rental import Rental, expected_rest
from tatami.retiling.takes import moves
from tatami.retiling.timing import Timing
from tatami.tiling import Layout

CERTAINTY = 4.0
"""Standard errors of a speed: a gain that is less is not believed."""
CERTAINTY_PROVED = 2.0
PROVED = 64
"""Iterations after an alarm, which proves that there is something to gain: what is not known is only how much."""
FAR_OUT = 0.4
"""Gain, as a fraction of an iteration, that justifies a move even if the last move did not bring what it promised."""
LEAST_GAIN = 0.03
"""Smallest gain worth acting on, as a fraction of an iteration."""
FIXED_S = 0.005
"""What a re-tiling costs beside its rows until one was measured: its planning, its agreement, buffers and groups."""
_LOOK = 32
"""Iterations after which drifts are looked at."""
_LOOK_AT = (4, 8, 16, 32, 64)
"""Iterations since the last alarm or re-tiling at which the speeds may be looked at, too: as their errors shrink, gains show.
A look plans, which takes 20 ms of a core for 8 ranks: the fastest rank does so for all, and not for less than it may bring."""
_MOST_WAITED = 8
"""Iterations for which nothing is done because something may just have changed."""
ALL_BUT_OUT = 0.125
"""A processor that keeps less than this of its work is as good as left out."""
MOST_KEPT = 4096

Found = TypeVar("Found")


class OneRankPlans(Protocol):
    """How ranks that all decide the same have one of them plan."""

    def __call__(self, leader: str, compute: Callable[[], Found]) -> tuple[Found, float]:
        """What `compute` gives on the rank of the processor `leader`, and the seconds that it took there; the same on all."""


def _tell_places(old: Layout, new: Layout) -> str:
    """Who is left out, and who is taken in again."""
    gone = [name for name in old.processors if name not in new.processors]
    back = [name for name in new.processors if name not in old.processors]
    left = f"; left out: {', '.join(gone)}" if gone else ""
    return left + (f"; taken in again: {', '.join(back)}" if back else "")


def plan_here(leader: str, compute: Callable[[], Found]) -> tuple[Found, float]:  # noqa: ARG001
    """Each rank plans by itself, in no time that counts."""
    return compute(), 0.0


@final
class Watcher(AbstractDecider):
    """Decides after every iteration.

    Attributes:
        alarms: all so far.
        glances: the last few thousand looks.
        planned: what plans. Each rank by itself, in no time that counts, unless it is set to something else.
    """

    def _begin(self) -> None:
        self.planned: OneRankPlans = plan_here
        self.alarms: list[Alarm] = []
        self.glances: deque[Glance] = deque(maxlen=MOST_KEPT)
        self._known = Estimates(self.cluster, workload=self.workload, layout=self.layout)
        self._accounts: dict[DecisionKind, Rental] = {}
        self._levels: tuple[Level, ...] = ()
        self._hidden_s = 0.0
        self._look_s = 0.0
        self._looked_at = 0
        self._is_due = False
        self._waited = 0
        self._stay_s = 0.0
        self._slow_since: dict[str, tuple[int, float]] = {}
        self._lengths: list[int] = []
        self._change_at = 0
        self._promise: tuple[float, float] | None = None
        self._distrust = 1.0
        self._return_s: dict[str, float] = {}
        self._fixed_s = FIXED_S
        self._predicted_move_s = 0.0

    @property
    def links(self) -> LinkWatch:
        """Between replicas, which are watched as well."""
        return self._known.links

    @property
    def works(self) -> dict[str, float]:
        """`Workload.tile_work` of every processor that has a tile."""
        return works_of(self.layout, workload=self.workload)

    def per_work_s(self, processor: str) -> float:
        """Seconds per work of a processor, as last known; NaN where it never was."""
        return self._known.per_work_s(processor)

    def moved(self, took_s: float) -> None:
        """The last re-tiling took the slowest rank so long; what it cost beside its rows is the next one's too."""
        self._fixed_s = max(0.0, took_s - self._predicted_move_s)

    def observe(self, iteration: int, timings: Iterable[Timing]) -> Decision | None:
        values = np.full(self.cluster.size, np.nan)
        for timing in timings:
            self._check_known(timing)
            if timing.work > 0:
                values[self.cluster.rank_of[timing.processor]] = timing.compute_s / timing.work
        return self.take(iteration, values)

    def take(self, iteration: int, values: Vector, *, late_s: Sequence[float] = ()) -> Decision | None:
        """As `observe`, of numbers.

        Args:
            iteration: as there.
            values: seconds per work in the order of the cluster; NaN or 0 where there is none.
            late_s: of each of `links.messages`, how long it took; 0 or less where that is not known.
        """
        fresh = self._known.take(iteration, values, late_s=late_s)
        for alarm in fresh:
            self._remember(alarm)
        since = iteration - max(self._known.since, self._change_at - 1)
        self._is_due |= since in _LOOK_AT
        # What may just have changed would be taken for the mean of before and after: a few samples later it is known.
        waits = not fresh and (self._is_due or bool(self._levels)) and self._waited < _MOST_WAITED and self._known.suspects
        self._waited = self._waited + 1 if waits else 0
        if fresh or (self._is_due and not waits and self._may_show_more() and self._pays_to_look(iteration)):
            self._look(iteration, lost=since)
        elif since % _LOOK == 0 and self._known.drifted(LEAST_GAIN / 2) and self._pays_to_look(iteration):
            self._look(iteration, lost=0)
        self._is_due &= waits
        chosen = self._choose(iteration) if self._levels and not waits else None
        if chosen is not None:
            return self._decide(iteration, chosen, fresh)
        if self._levels:
            for level in self._levels:
                self._accounts[level.kind].lose(self._stay_s - level.iteration_s)
            # Speeds are as at the last look.
            self._glance(iteration, self.glances[-1].speeds)
        return self._decide(iteration, None, fresh) if fresh else None

    def _may_show_more(self) -> bool:
        """Whether a look could show what the last one did not."""
        is_promised = self._promise is not None and self._known.enough
        return bool(self._levels or self._hidden_s) or is_promised or self._known.drifted(LEAST_GAIN / 2)

    def _pays_to_look(self, iteration: int) -> bool:
        """Whether what may have been lost since the last look is more than a look costs."""
        gain_s = max(self._hidden_s, self._known.imbalance_s, LEAST_GAIN * self._stay_s)
        return (iteration - self._looked_at) * gain_s >= self._look_s

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
            slow_hosts=self.links.slow_hosts,
        )

    def _look(self, iteration: int, *, lost: int) -> None:
        """Weigh again. `lost` iterations have gone by as the last of them."""
        error = self._known.error(self.layout.processors)
        if error is None:
            return
        self._known.learn_sizes()
        speeds = self._known.speeds()
        old = {level.kind: level for level in self._levels}
        was_s = self._stay_s
        (self._stay_s, found), self._look_s = self.planned(
            self._leader(speeds), lambda: levels(self._situation(), self._known.by_size(speeds), fixed_s=self._fixed_s)
        )
        self._looked_at = iteration
        self._settle_promise()
        is_proved = bool(self.alarms) and iteration - self._change_at < PROVED
        least_s = max(LEAST_GAIN, (CERTAINTY_PROVED if is_proved else CERTAINTY) * error) * self._stay_s
        self._levels = tuple(level for level in found if self._stay_s - level.iteration_s > least_s)
        # Gains that are large enough, but not certain yet.
        gains_s = [self._stay_s - level.iteration_s for level in found]
        self._hidden_s = max((gain_s for gain_s in gains_s if LEAST_GAIN * self._stay_s < gain_s <= least_s), default=0.0)
        kinds = {level.kind for level in self._levels}
        for kind, account in self._accounts.items():
            if kind not in kinds and account.loss_s:
                account.ended(old[kind].price_s if kind in old else account.loss_s)
        for level in self._levels:
            account = self._accounts.setdefault(level.kind, Rental())
            rate_s = self._stay_s - level.iteration_s
            counted_s = was_s - old[level.kind].iteration_s if level.kind in old else 0.0
            # With an alarm after iteration 103 for a change that began with 101, `lost` is 3: iterations that went by
            # unnoticed.
            # What an iteration has cost since the change began is known only now.
            account.lose(lost * max(0.0, rate_s - counted_s))
        self._glance(iteration, tuple(speeds.values()))

    def _leader(self, speeds: Mapping[str, float]) -> str:
        """Plans for all: the fastest of those that have a tile, whose speed is known."""
        return max(self.layout.processors, key=lambda name: speeds[name])

    def _settle_promise(self) -> None:
        """Whether the last move brought what it promised, as far as it is known by now."""
        if self._promise is None or not self._known.enough:
            return
        gain_s, before_s = self._promise
        self._promise = None
        # Example: a move from 100 ms an iteration was to gain 20 ms, and it takes 94 ms since. Less than half came true, so the
        # next move must be worth four times its price; where that one keeps its promise, the one after it twice, and the next
        # its price.
        held = before_s - self._stay_s >= gain_s / 2
        self._distrust = max(1.0, self._distrust / 2) if held else 4 * self._distrust

    def _choose(self, iteration: int) -> Level | None:
        """The fastest of what is due."""
        rest = expected_rest(self._lengths, lasted=max(0, iteration - self._change_at))
        due = [
            level
            for level in self._levels
            if self._accounts[level.kind].due(
                self._trusted(level) * level.price_s + self._returning_s(level.layout),
                rate_s=self._stay_s - level.iteration_s,
                rest=rest,
            )
        ]
        return min(due, key=lambda level: level.iteration_s, default=None)

    def _trusted(self, level: Level) -> float:
        """How many times its price a level must be worth. What is far out of balance is no matter of forecasts."""
        return self._distrust if self._stay_s - level.iteration_s < FAR_OUT * self._stay_s else 1.0

    def _returning_s(self, layout: Layout) -> float:
        """What the processors that would be taken in again cost when they were last left out; nothing for the first time."""
        if not self._return_s:
            return 0.0
        now, then = self.works, works_of(layout, workload=self.workload)
        back = (name for name in then if now.get(name, 0.0) < ALL_BUT_OUT * then[name])
        return max((self._return_s.get(name, 0.0) for name in back), default=0.0)

    def _leave_out(self, layout: Layout, *, cost_s: float) -> None:
        """Remember what it cost until those that have next to nothing in `layout` were left out."""
        now, then = self.works, works_of(layout, workload=self.workload)
        for name in now:
            if then.get(name, 0.0) < ALL_BUT_OUT * now[name]:
                self._return_s[name] = max(self._return_s[name], cost_s) if name in self._return_s else 0.0

    def _decide(self, iteration: int, chosen: Level | None, fresh: list[Alarm]) -> Decision:
        speeds = self._known.speeds()
        situation = self._situation()
        told = "; ".join(tell_alarm(alarm) for alarm in fresh)
        ratio = situation.forecast(self.layout, speeds).ratio
        if chosen is None:
            best = min(self._levels, key=lambda level: level.iteration_s, default=None)
            unsure = f"{1e3 * self._hidden_s:.3g} ms an iteration might be gained, which is not certain yet"
            told += ": " + (
                (unsure if self._hidden_s else "nothing to gain")
                if best is None
                else f"{1e3 * (self._stay_s - best.iteration_s):.3g} ms an iteration lost, "
                f"{1e3 * self._accounts[best.kind].loss_s:.3g} ms of {1e3 * best.price_s:.3g} so far"
            )
            layout, kind = self.layout, DecisionKind.KEEP
        else:
            account = self._accounts[chosen.kind]
            rate_s = self._stay_s - chosen.iteration_s
            layout, kind = chosen.layout, chosen.kind
            old, new = (each.cut(samples=self.workload.samples, units=self.workload.units) for each in (self.layout, layout))
            (moved, messages), _ = self.planned(
                self._leader(speeds), lambda: (sum(move.units.size for move in moves(old, new)), self.links.messages_of(layout))
            )
            told = f"{told}; " if told else ""
            told += (
                f"{1e3 * rate_s:.3g} of {1e3 * self._stay_s:.3g} ms an iteration lost, {1e3 * account.loss_s:.3g} ms so far; "
                f"moving costs {1e3 * chosen.price_s:.3g} ms; speeds {tell_speeds(speeds)}; {moved} unit rows move"
                f"{_tell_places(self.layout, layout)}"
            )
            self._predicted_move_s = chosen.price_s - self._fixed_s
            self._glance(iteration, tuple(speeds.values()))
            self._leave_out(chosen.layout, cost_s=account.loss_s + chosen.price_s)
            account.moved(chosen.price_s, rate_s=rate_s)
            self._leave(iteration, chosen, messages=messages)
        return Decision(
            kind=kind,
            iteration=iteration,
            layout=layout,
            speeds=speeds,
            ratio=ratio,
            predicted=situation.forecast(layout, speeds).ratio,
            reason=f"iteration {iteration}: {told}: {kind.value}",
        )

    def _leave(self, iteration: int, chosen: Level, *, messages: tuple[WatchedMessage, ...]) -> None:
        """From now on the tiles lie otherwise."""
        self._known.learn_sizes()
        self._promise = (self._stay_s - chosen.iteration_s, self._stay_s)
        for account in self._accounts.values():
            account.loss_s = 0.0
        self._levels = ()
        self.layout = chosen.layout
        self._known.lie(chosen.layout, iteration=iteration, messages=messages)

    def _glance(self, iteration: int, speeds: tuple[float, ...]) -> None:
        self.glances.append(
            Glance(
                iteration=iteration,
                speeds=speeds,
                loss_s={level.kind: self._accounts[level.kind].loss_s for level in self._levels},
                price_s={level.kind: level.price_s for level in self._levels},
            )
        )
