"""The state machine of DRPM: timings in, decisions out. It knows no ranks, no network and no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from tatami.errors import PlanError
from tatami.retiling.ability import ability
from tatami.retiling.deciding import AbstractDecider
from tatami.retiling.decision import Decision, DecisionKind, Verdict, tell
from tatami.retiling.published import published
from tatami.retiling.replica_cuts import forecast
from tatami.retiling.settling import MEMORY, settling
from tatami.retiling.situation import SIGNALS, Signal, Situation, Window, points
from tatami.retiling.takes import moves
from tatami.retiling.timing import Timing

LEAST_POINTS = 2
"""Points since the last re-mapping that a check needs of every processor: a line has two."""


@final
class Controller(AbstractDecider):
    """Decides at every check whether to re-tile, by the rules of DRPM. Iterations are counted from 1.

    Raises:
        PlanError: as of `AbstractDecider`, and where the rule is one for `Watcher`.
        ClusterError: a speed depends on the size of the tile, which these rules do not know.
    """

    def _begin(self) -> None:
        retiler = self.retiler
        if retiler.watches:
            raise PlanError(
                f"Controller checks every few iterations, by the rules of DRPM, and not by {retiler.rule!r}: take "
                "`tatami.retiling.Watcher`, or Retiler(rule='settling')"
            )
        self.cluster.plain_speeds(f"Retiler(rule={retiler.rule!r})")
        self.checks = 0
        self._first = not self._known_speeds
        self._since: int | None = None
        self._streak = 0
        self._kept: dict[str, dict[int, Timing]] = {}
        self._last: dict[Signal, dict[str, float]] = {signal: {} for signal in SIGNALS}

    def observe(self, iteration: int, timings: Iterable[Timing]) -> Decision:
        """Check the balance after `iteration`.

        Args:
            iteration: the last one that was completed. A re-mapping takes effect after it.
            timings: at least the last L iterations of every processor that has a tile, in any order. Those up to the last
                re-mapping are not looked at.

        Raises:
            PlanError: a timing of a processor that the cluster has not.
        """
        self.checks += 1
        recent = self._take(timings)
        situation = Situation(
            retiler=self.retiler,
            cluster=self.cluster,
            workload=self.workload,
            layout=self.layout,
            recent=recent,
            kept={name: tuple(own.values()) for name, own in self._kept.items()},
            last=self._last,
            first=self._first,
            streak=self._streak,
        )
        short = self._short(recent)
        if short is not None:
            speeds = situation.speeds("compute_s", window=recent)
            verdict = Verdict(kind=DecisionKind.KEEP, why=short, layout=self.layout, speeds=speeds, ratio=None)
        else:
            verdict = (published if self.retiler.rule == "published" else settling)(situation)
            self._first = False
        decision = self._decide(verdict, iteration)
        self._remember(verdict, iteration, recent)
        return decision

    def _take(self, timings: Iterable[Timing]) -> Window:
        """The last L points of all ranks since the last re-mapping, which also join those that are kept."""
        placed = set(self.layout.processors)
        fresh: dict[str, list[Timing]] = {name: [] for name in self.cluster.by_name if name in placed}
        for timing in timings:
            self._check_known(timing)
            if timing.processor in fresh and timing.work > 0 and (self._since is None or timing.iteration > self._since):
                fresh[timing.processor].append(timing)
        recent: dict[str, tuple[Timing, ...]] = {}
        for name, own in fresh.items():
            recent[name] = tuple(sorted(own, key=lambda timing: timing.iteration)[-self.retiler.window :])
            kept = {**self._kept.get(name, {}), **{timing.iteration: timing for timing in recent[name]}}
            self._kept[name] = dict(list(kept.items())[-MEMORY * self.retiler.window :])
        return recent

    def _short(self, recent: Window) -> str | None:
        """Why nothing can be said yet."""
        name, count = min(((name, len(own)) for name, own in recent.items()), key=lambda item: item[1])
        if count >= LEAST_POINTS:
            return None
        since = "since the start" if self._since is None else "since the last re-mapping"
        return f"{name} has {count} of the {LEAST_POINTS} timings needed {since}"

    def _decide(self, verdict: Verdict, iteration: int) -> Decision:
        old = self.tiling
        new = old if verdict.kind is DecisionKind.KEEP else verdict.layout.cut(samples=old.samples, units=old.units)
        predicted = forecast(verdict.layout, workload=self.workload, speeds=verdict.speeds).ratio
        moved = 0 if verdict.kind is DecisionKind.KEEP else sum(move.units.size for move in moves(old, new))
        return Decision(
            kind=verdict.kind,
            iteration=iteration,
            layout=verdict.layout,
            speeds=verdict.speeds,
            ratio=verdict.ratio,
            predicted=predicted,
            reason=tell(verdict, check=self.checks, iteration=iteration, old=old, new=new, moved=moved, predicted=predicted),
        )

    def _remember(self, verdict: Verdict, iteration: int, recent: Window) -> None:
        for signal in SIGNALS:
            found = {name: ability(own) for name, own in points(recent, signal).items()}
            self._last[signal].update({name: speed for name, speed in found.items() if speed is not None})
        if verdict.kind is not DecisionKind.KEEP:
            self.layout, self._since = verdict.layout, iteration
            self._kept = {}
            self._streak += 1
        elif verdict.settled:
            self._streak = 0
