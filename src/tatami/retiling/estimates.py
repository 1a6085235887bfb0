"""What the times of a run have shown: which processors and links changed, and how fast each processor is.

The compute time per work of every processor, and the slowness of every link between replicas, are watched by one `Detector`: an
iteration is one step of its arrays. `tatami.retiling.sizes` learns from each re-tiling how a processor's speed goes with the
size of its tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster, SpeedTable, speed_at
from tatami.retiling.alarms import Alarm, alarm_of
from tatami.retiling.link_watch import LinkWatch, WatchedMessage
from tatami.retiling.noticing import WINDOW, Detector, Vector
from tatami.retiling.replica_cuts import works_of
from tatami.retiling.sizes import LEAST_DIFFERENCE, SizedTimes
from tatami.tiling import Layout
from tatami.workload import Workload

_ENOUGH = 8
"""Samples under the tiles of now that replace what was known of a processor before."""
_SURE = 32
"""Samples that outweigh what a processor was before it changed, at whatever size they are."""
AGREE = 3.0
"""Standard errors within which samples under other tiles, at another size, are of the same speed."""
AS_USUAL = 0.25
"""Within so much of what it was before it changed for the first time, a processor that changed again is what it was."""


@dataclass
class _Remembered:
    """Levels, NaN where there is none, and how many samples each is worth."""

    level: Vector
    worth: NDArray[np.int64]

    @classmethod
    def nothing(cls, size: int) -> _Remembered:
        return cls(np.full(size, np.nan), np.zeros(size, dtype=np.int64))

    def put(self, index: int, level: float, worth: int) -> None:
        self.level[index], self.worth[index] = level, worth


class Estimates:
    """What is known of the processors and links of one run.

    Attributes:
        links: between replicas.
        works: `Workload.tile_work` of every processor, in the order of the cluster; 0 without a tile.
        since: the iteration after which the tiles lie as they do; 0 from the start.
    """

    def __init__(self, cluster: Cluster, *, workload: Workload, layout: Layout) -> None:
        self.links = LinkWatch(cluster, workload=workload)
        self._cluster = cluster
        self._workload = workload
        self._size = cluster.size
        self._names = tuple(cluster.by_name)
        self._detector = Detector((self._size,))
        self._sizes = SizedTimes(self._size, given=_in_work(cluster, workload=workload))
        self._sized_at: Vector = np.full(self._size, workload.samples * workload.units / self._size)
        self._last: Vector = np.full(self._size, np.nan)
        self._worth, self._bursts = (np.zeros(self._size, dtype=np.int64) for _ in range(2))
        # Under other tiles, and before the processor changed.
        self._prior, self._usual = (_Remembered.nothing(self._size) for _ in range(2))
        self.lie(layout, iteration=0, messages=self.links.messages_of(layout))

    def lie(self, layout: Layout, *, iteration: int, messages: tuple[WatchedMessage, ...]) -> None:
        """Takes note of the layout after `iteration`; what was measured under others cannot be compared."""
        if np.isfinite(self._last).any():
            self._prior = _Remembered(*self._pooled())
        self._recovered = np.zeros(self._size, dtype=bool)
        works = works_of(layout, workload=self._workload)
        self.works: Vector = np.array([works.get(name, 0.0) for name in self._names])
        self._sized_at = np.where(self.works > 0, self.works, self._sized_at)
        self.links.lie(messages)
        self._detector = self._detector.renewed((self._size, *([len(self.links.pairs)] if self.links.pairs else [])))
        self.since = iteration

    def take(self, iteration: int, values: Vector, *, late_s: Sequence[float]) -> list[Alarm]:
        """One sample of each; see `Watcher.take`. Says what changed."""
        if self._usual.worth.any():
            values = self._without_bursts(values)
        if self.links.pairs:
            values = np.concatenate((values, self.links.slowness(late_s)))
        changed = self._detector.step(values)
        return [self._alarm(int(index), iteration) for index in np.flatnonzero(changed)] if np.count_nonzero(changed) else []

    def _without_bursts(self, values: Vector) -> Vector:
        """The values without those that say a slow machine is twice as fast as it used to be, unless there are many in a row.

        A container that is held to a part of a core may use that up elsewhere, and a small tile then takes no time at all.
        """
        usual = self._usual.level
        burst = (self._level > 2 * usual) & (values < usual / 2)
        self._bursts = (self._bursts + 1) * burst
        shown: Vector = np.where(burst & (self._bursts < _ENOUGH), np.nan, values)
        return shown

    def _alarm(self, index: int, iteration: int) -> Alarm:
        link = self.links.pairs[index - self._size] if index >= self._size else None
        alarm = alarm_of(self._detector, index, iteration, processor="" if link else self._names[index], link=link)
        if link is None:
            self._sizes.scale(index, alarm.slower)
            self._remember(index, alarm)
        else:
            self.links.changed(link, slower=alarm.slower)
        return alarm

    def _remember(self, index: int, alarm: Alarm) -> None:
        """What has changed is as it used to be, if that is what it looks like: machines that were slow recover."""
        prior, usual = self._prior, self._usual
        was_s, is_s = alarm.before_s / usual.level[index], alarm.after_s / usual.level[index]
        low, high = 1 - AS_USUAL, 1 + AS_USUAL
        # A small tile may take less for its work: that a machine is now faster than it ever was, a larger one has to show.
        if (was_s > high >= is_s) or (was_s < low <= is_s <= high):
            prior.put(index, usual.level[index], usual.worth[index])
            usual.put(index, np.nan, 0)
            self._recovered[index] = True
        else:
            if not usual.worth[index]:
                usual.put(index, self._last[index], self._worth[index])
            prior.put(index, np.nan, 0)
            self._recovered[index] = False

    def _pooled(self) -> tuple[Vector, NDArray[np.int64]]:
        """Levels from these samples and what was known before, as far as both agree; and how many samples they are worth."""
        prior, level, count = self._prior, self._level, self._count
        differs = np.abs(level - prior.level) > np.maximum(LEAST_DIFFERENCE, AGREE * self._error) * prior.level
        differs &= ~self._recovered | (count >= _SURE)
        worth = np.where(differs, 0, prior.worth)
        known, seen = np.where(worth > 0, worth * prior.level, 0.0), np.where(count > 0, count * level, 0.0)
        together = worth + count
        pooled: Vector = np.where(together > 0, (known + seen) / np.maximum(together, 1), level)
        return pooled, np.minimum(together, WINDOW)

    @property
    def _level(self) -> Vector:
        """Seconds per work of every processor as its samples under these tiles have it."""
        return self._detector.level[: self._size]

    @property
    def _count(self) -> NDArray[np.int64]:
        return self._detector.count[: self._size]

    @property
    def _error(self) -> Vector:
        return self._detector.error[: self._size]

    @property
    def suspects(self) -> bool:
        """Whether something may just have changed, so that levels and their errors are about to."""
        return self._detector.suspects

    @property
    def enough(self) -> bool:
        """Whether there are samples enough under these tiles to say what they brought."""
        return bool(self._count.max() >= _ENOUGH)

    def error(self, processors: Iterable[str]) -> float | None:
        """The largest relative standard error of these speeds; None while one has samples but no noise, or none has samples."""
        placed = [self._cluster.rank_of[name] for name in processors]
        errors, measured = self._error[placed], self._count[placed] > 0
        # As far as samples of before agree, there are more.
        errors = errors * np.sqrt(np.maximum(self._count, 1) / np.maximum(self._pooled()[1], 1))[placed]
        if not measured.any() or not np.isfinite(errors[measured]).all():
            return None
        return float(np.nanmax(errors))

    @property
    def imbalance_s(self) -> float:
        """By how much the slowest tile takes longer than all would if they took the same time; no layout gains more compute."""
        level = self._pooled()[0]
        known = np.isfinite(level) & (level > 0)
        if not known.any():
            return 0.0
        # fsum, as arrays may be summed in another order on another machine.
        together = fsum(self.works.tolist()) / fsum((1.0 / level[known]).tolist())
        return float((self.works * level)[known].max() - together)

    def drifted(self, by: float) -> bool:
        """Whether a level has gone further than this fraction, and its error, since `speeds` was last asked."""
        known = np.isfinite(self._last) & (self._count > 0)
        drift = np.abs(self._pooled()[0] - self._last) > np.maximum(by, 2 * self._error) * self._last
        return bool((drift & known).any() or not np.isfinite(self._last).any())

    def per_work_s(self, processor: str) -> float:
        """Seconds per work of a processor, as last known; by the speeds that were given where it never was; else NaN."""
        return float(1.0 / self._by_now()[self._cluster.rank_of[processor]]) if np.isfinite(self._last).any() else np.nan

    def speeds(self) -> dict[str, float]:
        """Work per second of every processor, as well as it is known."""
        count = self._count
        enough = (count >= _ENOUGH) | ((count > 0) & (self.since == 0)) | ~np.isfinite(self._last)
        enough |= (count > 0) & (count < count.max())
        pooled, worth = self._pooled()
        fresh = enough & np.isfinite(self._level)
        self._last = np.where(fresh, pooled, self._last)
        self._worth = np.where(fresh, worth, self._worth)
        return dict(zip(self._names, map(float, self._by_now()), strict=True))

    def _by_now(self) -> Vector:
        """Work per second: as last known, and of the others as given, in proportion."""
        # Of a processor without a tile, at the size of its last one.
        flop = map(float, self._sized_at * self._workload.work_flop)
        given = np.array([speed_at(speed, work) for speed, work in zip(self._cluster.speeds.values(), flop, strict=True)])
        speeds = 1.0 / self._last
        known = np.isfinite(speeds)
        # Example: the given speeds are 1, 1.5 and 2, and the first two were found to do 2e9 and 3e9 work a second. Both are 2e9
        # times what was given, and so the third one is taken to do 4e9.
        scale = np.sort((speeds / given)[known])[known.sum() // 2] if known.any() else 1.0
        filled: Vector = np.where(known, speeds, given * scale)
        return filled

    def by_size(self, speeds: Mapping[str, float]) -> dict[str, float]:
        """The same as functions of the size of the tile, where they are known to depend on it."""
        return {
            name: self._sizes.speed(rank, work=float(self._sized_at[rank]), speed=speeds[name])
            for rank, name in enumerate(self._names)
        }

    def learn_sizes(self) -> None:
        """What the tiles as they lie have shown."""
        for rank in map(int, np.flatnonzero((self._count >= _ENOUGH) & (self.works > 0))):
            self._sizes.learn(
                rank, work=float(self.works[rank]), per_work_s=float(self._level[rank]), error=float(self._error[rank])
            )


def _in_work(cluster: Cluster, *, workload: Workload) -> dict[int, SpeedTable]:
    """The speeds that depend on the size of the tile, by rank, in units of work."""
    scale = 1.0 / workload.work_flop
    return {
        rank: each.speed.scaled(size=scale, speed=scale)
        for rank, each in enumerate(cluster.processors)
        if isinstance(each.speed, SpeedTable)
    }
