"""Has a machine, or a link, become slower or faster? Two clipped CUSUMs for each, on the logarithm of its time per work.

A sample in units of its own noise, z = log(time / level) / noise, is clipped and added up: S = max(0, S + z - k). An alarm is
S > h; the change began when S last was 0. The sums run upwards and downwards, for two kinds of change (Page 1954):

* fast: k = 1.5 finds a change of more than some 3 times the noise in 3 samples;
* slow: k = 0.5 finds changes of the size of the noise, and drifts, in some tens.

h and the clip follow from the rate of false alarms (`tatami.retiling.thresholds`).

Level and noise are the median and the distance of the 10th and the 90th percentile of the last `WINDOW` samples since the last
change, so that a drift carries the level along; noise that remembers itself counts as wider. While a series may just have
changed, both stay as they are. Only +, -, *, /, the square root and comparisons are used, each by itself,
which give the same bits on every machine.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tatami.retiling.thresholds import FALSE_ALARMS, FAR, sums_for

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

WINDOW = 256
FIRST = 8
"""Samples before the first alarm of a run: a noise of fewer is too often a fraction of the true one."""
STEADY = 64
"""Samples since a change that the slow sums wait for: before, the level itself is not known to half the noise."""
_REFRESH = 8
_SUSPECT = 0.3
"""Fraction of h, in the fast sums, that one sample at the clip more than reaches."""
_TENTHS = 2.5631
"""Distance of the 10th and the 90th percentile of a normal distribution, in standard deviations."""
_OF_EIGHT = 1.7
_MOST_MEMORY = 0.8
_MEDIAN_VARIANCE = 1.57
"""Variance of the median of n normal samples, in n-ths of their variance."""
_LEAST_NOISE = 0.005
"""Relative. Clocks and schedulers are not finer, and a calm series must not make an alarm of every flutter."""


class Detector:
    """Watches series of times per work: ranks, and links.

    All of it is arrays of one entry for each series, so that an iteration costs the same few operations for one and for many.

    Args:
        shape: (..., series); what lies before the last axis are runs that are watched side by side.
        kinds: how many series there are of each kind, one kind after the other. Series of one kind and run share the rate of
            false alarms, and what is known of the noise at its beginning. Without it all are of one kind.
        false_alarms: of one kind of one run, for each iteration.

    Attributes:
        level: time per work as it is now, from the samples since the last change; NaN where there was none yet.
        before: the level as it was before the last step.
        noise: relative standard deviation of a sample.
        count: samples since the last change, up to `WINDOW`.
    """

    def __init__(
        self, shape: tuple[int, ...], *, kinds: tuple[int, ...] | None = None, false_alarms: float = FALSE_ALARMS
    ) -> None:
        kinds = shape[-1:] if kinds is None else kinds
        self._kinds = tuple(slice(end - num, end) for num, end in zip(kinds, accumulate(kinds), strict=True))
        self._false_alarms = false_alarms
        fast, slow = zip(*(pair for num in kinds for pair in [sums_for(num, false_alarms=false_alarms)] * num), strict=True)
        self._clip, self._far_clip = np.array([[each.clip, each.far_clip] for each in fast]).T
        self._suspect = np.array([_SUSPECT * each.h for each in fast])
        # The sums: upwards and downwards, fast and slow.
        ones = [1] * (len(shape) - 1)
        self._signs: Vector = np.array([1.0, -1.0, 1.0, -1.0]).reshape(4, *ones, 1)
        self._k, self._h = (
            np.array([[getattr(each, name) for each in of] for of in (fast, fast, slow, slow)]).reshape(4, *ones, -1)
            for name in ("k", "h")
        )
        self._sums: Vector = np.zeros((4, *shape))
        self._ages = np.zeros((4, *shape), dtype=np.int64)
        self.level: Vector = np.full(shape, np.nan)
        self.before = self.level
        self.noise: Vector = np.full(shape, np.nan)
        self.count = np.zeros(shape, dtype=np.int64)
        self._own_noise: Vector = np.full(shape, np.nan)
        self._noise_count = np.zeros(shape, dtype=np.int64)
        self._precision: Vector = np.full(shape, np.nan)
        # The last samples of every series, (WINDOW, *shape), and a row for what is no sample, which is never read.
        self._rings: Vector = np.full((WINDOW + 1, *shape), np.nan)
        self._size = self.level.size
        self._nowhere = WINDOW * self._size
        self._places = np.arange(self._size).reshape(shape)  # of the next sample in the flat rings
        self._calm: Mask = np.zeros(shape, dtype=bool)
        self._calm.flags.writeable = False
        self._any_young = True
        self._steps = 0

    @property
    def suspects(self) -> bool:
        """Whether a series may just have changed: the next few samples will tell."""
        return bool((self._sums[:2] > self._suspect).any())

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
        self.before = self.level
        valid: Mask = np.greater(values, 0)
        self._keep(values, valid)
        z = _in_noises(values / self.level, precision=self._precision, clip=self._clip, far_clip=self._far_clip)
        # Example: of 8 ranks with 2 % of noise one becomes 20 % slower. log(1.2) / 0.02 = 9.1 is clipped to 3.27, so that each
        # sample adds 3.27 - 1.5 = 1.77 to the fast sum: 1.77, 3.54, and 5.31 > h = 4.87, an alarm with the third one. Two
        # samples, whatever they are, stay below; of such that take more than twice as long, which are clipped at 2.80, three
        # do. Noise of one sigma adds 1 - 1.5 < 0, and the sum falls back to 0.
        rises = self._signs * z
        rises -= self._k
        # Sums stay where there is no sample, and at 0 where level or noise are not known yet, so that z is NaN.
        np.add(self._sums, rises, out=self._sums, where=valid)
        np.fmax(self._sums, 0.0, out=self._sums)
        self._ages += valid
        self._ages *= self._sums > 0
        if self._any_young or self._steps % _REFRESH == 0:
            self._refresh_due()
        over: Mask = np.greater(self._sums, self._h)
        if not np.count_nonzero(over):
            return self._calm
        over[2:] &= self.count >= STEADY
        changed: Mask = np.asarray(over.any(axis=0))
        if changed.any():
            age = np.where(over, self._ages, 0).max(axis=0)
            self._restart(changed, np.minimum(age, WINDOW))
        return changed

    def renewed(self, kinds: tuple[int, ...]) -> Detector:
        """After a re-tiling: levels belong to other tiles from now on. What is known of the noise of the first kind stays."""
        fresh = Detector((*self.level.shape[:-1], sum(kinds)), kinds=kinds, false_alarms=self._false_alarms)
        fresh._steps = self._steps
        first = (..., self._kinds[0])
        for new, old in (
            (fresh.noise, self.noise),
            (fresh._own_noise, self._own_noise),
            (fresh._noise_count, self._noise_count),
        ):
            new[first] = old[first]
        return fresh

    def _keep(self, values: Vector, valid: Mask) -> None:
        """Write the samples into the rings, each of which has a place of its own: not all series have one in every step."""
        if np.count_nonzero(valid) == self._size:
            self._rings.put(self._places, values)
            self._places += self._size
        else:
            self._rings.put(np.where(valid, self._places, self._nowhere), values)
            self._places += self._size * valid
        self._places %= self._nowhere
        self.count += valid
        np.minimum(self.count, WINDOW, out=self.count)

    def _restart(self, changed: Mask, keep: NDArray[np.int64]) -> None:
        """Forget all but the last `keep` samples of the series that changed."""
        for index in zip(*np.nonzero(changed), strict=True):
            newest, replica = divmod(int(self._places[index]), self._size)
            ring = self._rings[(slice(WINDOW), *index)]
            kept = ring[np.arange(newest - int(keep[index]), newest) % WINDOW]
            kept = kept[self._began(kept, index) :]
            keep[index] = len(kept)
            ring[:] = np.nan
            ring[: len(kept)] = kept
            self._places[index] = len(kept) % WINDOW * self._size + replica
        self.count = np.where(changed, keep, self.count)
        self._sums[:, changed] = 0.0
        self._ages[:, changed] = 0
        self._any_young = True
        self._refresh(changed)

    def _began(self, kept: Vector, index: tuple[np.int64, ...]) -> int:
        """Where in these samples the change began most likely: the last k of them, which add up to S, where S^2 / k is largest.

        The sum has grown from 0 since, or from before if noise had it above 0 when the change came: then the first samples are
        as they were, and the speed since would come out between the old and the new.
        """
        clips = self._clip[index[-1]], self._far_clip[index[-1]]
        z = _in_noises(kept / self.before[index], precision=self._precision[index], clip=clips[0], far_clip=clips[1])
        back = np.cumsum(z[::-1])
        return len(kept) - 1 - int(np.argmax(back * back / np.arange(1, len(kept) + 1)))

    def _refresh_due(self) -> None:
        """Estimate again: young series after each sample, all others now and then.

        A series that may just have changed keeps its level and noise: with samples of before and after in one window, the noise
        would be as large as the change, which would then be neither seen nor believed.
        """
        some = self.count > 0
        few = self.count <= FIRST
        self._any_young = bool(few.any())
        due = some & few
        if self._steps % _REFRESH == 0:
            due |= some & (self._sums[:2] <= self._suspect).all(axis=0)
        if due.any():
            self._refresh(due)

    def _refresh(self, which: Mask) -> None:
        """Level and noise of these series, from their rings."""
        rings = self._rings[:WINDOW, which]
        ordered = np.sort(rings, axis=0)  # NaN last
        count = self.count[which]
        index = np.arange(len(count))
        some = np.maximum(count, 1)
        level = ordered[(some - 1) // 2, index]
        self.level = self.level.copy()  # `before` stays
        self.level[which] = level
        # Of few samples not the first and the last, which one stall would be; their distance is 1.7 of 8 and more of more.
        few = some < 2 * FIRST
        low = np.where(few, np.minimum(1, some - 1), some // 10)
        distance = ordered[some - 1 - low, index] - ordered[low, index]
        spread = distance / (level * np.where(few, _OF_EIGHT, _TENTHS))
        # A noise of few samples is often far too small; what is known from longer windows is kept.
        known = self._noise_count[which]
        better = (count >= FIRST) & (count >= np.minimum(known, STEADY))
        # As much larger as it may be too small, one standard error.
        larger = 1.0 + 0.8 / np.sqrt(some)
        wider = _wider(rings, level, count=count, oldest=self._places[which] // self._size)
        self._own_noise[which] = np.where(better, np.maximum(spread * larger * wider, _LEAST_NOISE), self._own_noise[which])
        self._noise_count[which] = np.where(better, count, known)
        for kind in self._kinds:
            if which[..., kind].any():
                self._weigh(kind)

    def _weigh(self, kind: slice) -> None:
        """The noise of all series of a kind, and what a sample counts in units of it."""
        own = noise = self._own_noise[..., kind]
        young = self._noise_count[..., kind] < STEADY
        if young.any():
            # The others of the run know what is usual, as long as a series knows little itself.
            known = np.isfinite(own).sum(axis=-1, keepdims=True)
            middle = np.take_along_axis(np.sort(own, axis=-1), np.maximum(known - 1, 0) // 2, axis=-1)
            noise = np.where(young, np.fmax(own, middle), own)
        self.noise[..., kind] = noise
        self._precision[..., kind] = 1.0 / (noise * np.sqrt(1.0 + _MEDIAN_VARIANCE / np.maximum(self.count[..., kind], 1)))


def _in_noises(ratio: Vector, *, precision: Vector | float, clip: Vector | float, far_clip: Vector | float) -> Vector:
    """The logarithms of these ratios to the level in units of the noise, not further from 0 than one sample counts."""
    most = np.where((ratio > FAR) | (ratio < 1.0 / FAR), far_clip, clip)
    z = log(ratio)
    z *= precision
    found: Vector = np.maximum(np.minimum(z, most), -most)
    return found


def _wider(rings: Vector, level: Vector, *, count: NDArray[np.int64], oldest: NDArray[np.int64]) -> Vector | float:
    """How many times as wide noise is that remembers itself, to sums over many samples: sqrt((1 + r) / (1 - r)).

    r, the correlation of a sample with the one before, is told by how often both are on the same side of the level, which
    stalls do not disturb and which is counted exactly: r = sin(pi q / 2), within 2 % q (3 - q^2) / 2, where q is the share
    of pairs on one side less that on two. One standard error less than found, so that other noise is not widened.

    Args:
        rings: (WINDOW, series).
        level: of each series.
        count: how many samples it has; they are the first ones as long as its ring is not full.
        oldest: where the oldest sample of a full ring is.
    """
    steady = count >= STEADY
    if not steady.any():
        return 1.0
    above = rings > level
    agree = ((above[1:] == above[:-1]) & (np.arange(1, WINDOW)[:, None] < count)).sum(axis=0)
    # In a full ring the last row is followed by the first, and the newest sample is not followed by the oldest.
    index = np.arange(len(count))
    seams = (above[-1] == above[0]).astype(np.int64) - (above[oldest - 1, index] == above[oldest, index])
    agree += np.where(count == WINDOW, seams, 0)
    pairs = np.maximum(count - 1, 1)
    q = np.maximum(0.0, 2.0 * agree / pairs - 1.0 - 1.0 / np.sqrt(pairs))
    r = np.minimum(q * (3.0 - q * q) / 2.0, _MOST_MEMORY)
    found: Vector = np.where(steady, np.sqrt((1.0 + r) / (1.0 - r)), 1.0)
    return found


_LN2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476
_SERIES = (1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0)


def log(values: Vector) -> Vector:
    """The natural logarithm to 1e-9, with the same bits on every machine, unlike that of a library."""
    mantissa, exponent = np.frexp(values)
    low = mantissa < _ROOT_HALF
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    total = square * _SERIES[0]
    for coefficient in _SERIES[1:-1]:
        total += coefficient
        total *= square
    total += _SERIES[-1]
    found: Vector = 2.0 * s * total + (exponent - low) * _LN2
    return found
