"""Has a machine, or a link, become slower or faster? Two clipped CUSUMs for each, on the logarithm of its time per work.

A sample in units of its own noise, z = log(time / level) / noise, is clipped at `clip` and added up: S = max(0, S + z - k). An
alarm is S > h; the change began when S last was 0. The sums run upwards and downwards, for two kinds of change (Page 1954):

* fast: k = 1.5 finds a change of more than some 3 times the noise in 3 samples;
* slow: k = 0.5 finds changes of the size of the noise, and drifts, in some tens.

h follows from the rate of false alarms. Normal noise is told by Siegmund's approximation of the mean time between them,
(exp(2 k b) - 2 k b - 1) / (2 k^2) with b = h + 1.166 (Siegmund: Sequential Analysis, 1985, equation 2.57). Stalls are not
normal: where one iteration in a hundred takes three times as long, a rule that answers to n such samples in a row also answers
to n stalls in a row, and there are `outlier_share` ** n of these for each series and iteration. That is a bound for every rule,
and it sets n: samples are clipped so that n - 1 of them cannot reach h, however long they are. What takes more than `FAR` times
as long is more often a stall than a slower machine, so that one more of these is needed.

Level and noise are the median and the distance of the 10th and the 90th percentile of the last `WINDOW` samples since the last
change, so that a drift carries the level along; noise that remembers itself counts as wider. While a series may just have
changed, both stay as they are. Only +, -, *, /, the square root and comparisons are used, each by itself,
which give the same bits on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

FALSE_ALARMS = 1e-5
"""Of all series together, for each iteration: one in 100,000."""
OUTLIER_SHARE = 0.01
FAR = 2.0
"""From this many times the level on, a sample may as well be a stall."""
WINDOW = 256
FIRST = 8
"""Samples before the first alarm of a run: a noise of fewer is too often a fraction of the true one."""
STEADY = 64
"""Samples since a change that the slow sums wait for: before, the level itself is not known to half the noise."""
_FAST, _SLOW = 1.5, 0.5
_UNSURE = 1.25
_REFRESH = 8
_SUSPECT = 0.3
"""Of h, in the fast sums: what one sample at the clip more than reaches."""
_TENTHS = 2.5631
"""Distance of the 10th and the 90th percentile of a normal distribution, in standard deviations."""
_OF_EIGHT = 1.7
_MOST_MEMORY = 0.8
_MEDIAN_VARIANCE = 1.57
"""Of the median of n normal samples, in n-ths of their variance."""
_LEAST_NOISE = 0.005
"""Relative. Clocks and schedulers are not finer, and a calm series must not make an alarm of every flutter."""
_NORMAL_SHARE = 0.1
"""Of the false alarms are left to normal noise in either pair of sums; stalls have the rest."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The constants of a pair of CUSUMs, in units of the noise; samples beyond `FAR` are clipped at `far_clip`."""

    k: float
    h: float
    clip: float
    far_clip: float


def mean_time_between(k: float, h: float) -> float:
    """Samples from one false alarm of a one-sided CUSUM to the next in normal noise: Siegmund's approximation."""
    b = h + 1.166
    return (math.exp(2 * k * b) - 2 * k * b - 1) / (2 * k * k)


def sums_for(num_series: int, *, false_alarms: float = FALSE_ALARMS, outlier_share: float = OUTLIER_SHARE) -> tuple[Sums, Sums]:
    """The fast and the slow sums for so many series that are watched together."""
    # One stall for each clipped sample; so many in a row, and not fewer, make an alarm.
    in_a_row = max(2, math.ceil(math.log(false_alarms / num_series) / math.log(outlier_share) - 1e-6))
    samples = 2 * num_series / (_NORMAL_SHARE * false_alarms)
    # Inverts the approximation, whose exponential is all but everything; rounded, so that all machines have the same.
    fast_h, slow_h = (round(math.log(2 * k * k * samples) / (2 * k) - 1.166, 3) for k in (_FAST, _SLOW))
    # A quarter of a sample is left for those that are not quite at the clip.
    clip, far_clip = (round(_FAST + fast_h / (count - 0.25), 3) for count in (in_a_row, in_a_row + 1))
    return (
        Sums(k=_FAST, h=fast_h, clip=clip, far_clip=far_clip),
        # The level is not known exactly, which small k feel.
        Sums(k=_SLOW, h=round(_UNSURE * slow_h, 3), clip=clip, far_clip=far_clip),
    )


class Detector:
    """Watches series of times per work: ranks, or links.

    Args:
        shape: (..., series); series of one row are of one run, and share what is known of the noise at its beginning.
        false_alarms: of one row, for each iteration.

    Attributes:
        level: time per work as it is now, from the samples since the last change; NaN where there was none yet.
        noise: relative standard deviation of a sample.
        count: samples since the last change, up to `WINDOW`.
    """

    def __init__(self, shape: tuple[int, ...], *, false_alarms: float = FALSE_ALARMS) -> None:
        self.fast, self.slow = sums_for(shape[-1], false_alarms=false_alarms)
        self.level: Vector = np.full(shape, np.nan)
        self.noise: Vector = np.full(shape, np.nan)
        self.count = np.zeros(shape, dtype=np.int64)
        self._own_noise: Vector = np.full(shape, np.nan)
        self._noise_count = np.zeros(shape, dtype=np.int64)
        self._ring: Vector = np.full((WINDOW, *shape), np.nan)
        self._next = np.zeros(shape, dtype=np.int64)
        # Upwards and downwards, fast and slow.
        self._sums: Vector = np.zeros((4, *shape))
        self._ages = np.zeros((4, *shape), dtype=np.int64)
        bounds = [(each.k, each.h) for each in (self.fast, self.slow) for _ in range(2)]
        self._k, self._h = (np.array(values).reshape(4, *[1] * len(shape)) for values in zip(*bounds, strict=True))
        self._precision: Vector = np.full(shape, np.nan)
        self._even = True
        self._steps = 0

    @property
    def error(self) -> Vector:
        """Relative standard error of `level`."""
        found: Vector = self.noise * np.sqrt(_MEDIAN_VARIANCE / np.maximum(self.count, 1))
        return found

    def step(self, values: Vector) -> Mask:
        """Take one sample of each series (NaN or 0 where there is none); says which have changed.

        `level` and `count` of those are from then on those since the change.
        """
        self._steps += 1
        valid: Mask = np.greater(values, 0)
        complete = bool(valid.all())
        if not complete:
            values = np.where(valid, values, np.nan)
        self._keep(values, valid, complete=complete)
        ratio = values / self.level
        z = log(ratio) * self._precision
        clip = np.where((ratio > FAR) | (ratio < 1.0 / FAR), self.fast.far_clip, self.fast.clip)
        z = np.maximum(np.minimum(z, clip), -clip)
        both = np.stack((z, -z, z, -z)) - self._k
        # Where level and noise are not known yet, z is NaN and the sums stay at 0.
        self._sums = np.fmax(self._sums + both, 0.0) if complete else _added(self._sums, both)
        self._ages = (self._ages + valid) * (self._sums > 0)
        young = (self.count <= FIRST) & (self.count > 0)
        # A series that may just have changed keeps its level and noise: with samples of before and after in one window, the
        # noise would be as large as the change, which would then be neither seen nor believed.
        due = (
            young
            if self._steps % _REFRESH
            else young | ((self.count > 0) & (self._sums[:2] <= _SUSPECT * self.fast.h).all(axis=0))
        )
        if due.any():
            self._refresh(due)
        over = self._sums > self._h
        over[2:] &= self.count >= STEADY
        changed: Mask = np.asarray(over.any(axis=0))
        if changed.any():
            age = np.where(over, self._ages, 0).max(axis=0)
            self._restart(changed, np.minimum(age, WINDOW))
        return changed

    def restart(self) -> None:
        """After a re-tiling: levels belong to other tiles from now on. What is known of the noise stays."""
        self._restart(np.ones(self.level.shape, dtype=bool), np.zeros(self.level.shape, dtype=np.int64))
        self._even = True

    def _keep(self, values: Vector, valid: Mask, *, complete: bool) -> None:
        if complete and self._even:
            # All rings are filled to the same place, as long as no series changes.
            self._ring[self._next.flat[0]] = values
            self._next += 1
            self._next %= WINDOW
            self.count = np.minimum(self.count + 1, WINDOW)
            return
        self._even = False
        where = np.nonzero(valid)
        self._ring[(self._next[where], *where)] = values[where]
        self._next[where] = (self._next[where] + 1) % WINDOW
        self.count[where] = np.minimum(self.count[where] + 1, WINDOW)

    def _restart(self, changed: Mask, keep: NDArray[np.int64]) -> None:
        """Forget all but the last `keep` samples of the series that changed."""
        self._even = False
        for index in zip(*np.nonzero(changed), strict=True):
            newest = int(self._next[index])
            kept = [self._ring[((newest - 1 - back) % WINDOW, *index)] for back in range(int(keep[index]))]
            self._ring[(slice(None), *index)] = np.nan
            for place, value in enumerate(reversed(kept)):
                self._ring[(place, *index)] = value
            self._next[index] = len(kept) % WINDOW
        self.count = np.where(changed, keep, self.count)
        self._sums[:, changed] = 0.0
        self._ages[:, changed] = 0
        self._refresh(changed)

    def _refresh(self, which: Mask) -> None:
        """Level and noise of these series, from their rings."""
        rings = np.sort(self._ring[:, which], axis=0)  # NaN last
        count = self.count[which]
        index = np.arange(rings.shape[1])
        some = np.maximum(count, 1)
        level = rings[(some - 1) // 2, index]
        self.level[which] = level
        # Of few samples not the first and the last, which one stall would be; their distance is 1.7 of 8 and more of more.
        few = some < 2 * FIRST
        low = np.where(few, np.minimum(1, some - 1), some // 10)
        distance = rings[some - 1 - low, index] - rings[low, index]
        spread = distance / (level * np.where(few, _OF_EIGHT, _TENTHS))
        # A noise of few samples is often far too small; what is known from longer windows is kept.
        better = (count >= FIRST) & (count >= np.minimum(self._noise_count[which], STEADY))
        # As much larger as it may be too small, one standard error.
        larger = 1.0 + 0.8 / np.sqrt(some)
        own = self._own_noise[which]
        wider = self._wider(which, level, count)
        own = np.where(better, np.maximum(spread * larger * wider, _LEAST_NOISE), own)
        self._own_noise[which] = own
        self._noise_count[which] = np.where(better, count, self._noise_count[which])
        # The others of the run know what is usual, as long as a series knows little itself.
        usual = np.sort(self._own_noise, axis=-1)
        known = np.isfinite(self._own_noise).sum(axis=-1, keepdims=True)
        middle = np.take_along_axis(usual, np.maximum(known - 1, 0) // 2, axis=-1)
        young = self._noise_count < STEADY
        self.noise = np.where(young, np.fmax(self._own_noise, middle), self._own_noise)
        self._precision = 1.0 / (self.noise * np.sqrt(1.0 + _MEDIAN_VARIANCE / np.maximum(self.count, 1)))

    def _wider(self, which: Mask, level: Vector, count: NDArray[np.int64]) -> Vector:
        """How many times as wide noise is that remembers itself, to sums over many samples: sqrt((1 + r) / (1 - r)).

        r, the correlation of a sample with the one before, is told by how often both are on the same side of the level, which
        stalls do not disturb and which is counted exactly: r = sin(pi q / 2), within 2 % q (3 - q^2) / 2, where q is the share
        of pairs on one side less that on two. One standard error less than found, so that other noise is not widened.
        """
        if not (count >= STEADY).any():
            return np.ones(len(level))
        rings = self._ring[:, which]
        # Oldest first; a ring that is not full has NaN in the places that come next.
        order = (self._next[which] + np.arange(WINDOW)[:, None]) % WINDOW
        ordered = np.take_along_axis(rings, order, axis=0)
        above = ordered > level
        agree = ((above[1:] == above[:-1]) & np.isfinite(ordered[:-1])).sum(axis=0)
        pairs = np.maximum(count - 1, 1)
        q = np.maximum(0.0, 2.0 * agree / pairs - 1.0 - 1.0 / np.sqrt(pairs))
        r = np.minimum(q * (3.0 - q * q) / 2.0, _MOST_MEMORY)
        found: Vector = np.where(count >= STEADY, np.sqrt((1.0 + r) / (1.0 - r)), 1.0)
        return found


def _added(sums: Vector, both: Vector) -> Vector:
    found: Vector = np.where(np.isfinite(both), np.maximum(sums + both, 0.0), sums)
    return found


_LN2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476


def log(values: Vector) -> Vector:
    """The natural logarithm to 1e-9, with the same bits on every machine, unlike that of a library."""
    mantissa, exponent = np.frexp(values)
    low = mantissa < _ROOT_HALF
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    total = square * (1.0 / 11) + 1.0 / 9
    for odd in (7, 5, 3, 1):
        total = total * square + 1.0 / odd
    return 2.0 * s * total + (exponent - low) * _LN2
