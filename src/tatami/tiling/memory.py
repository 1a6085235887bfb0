"""What a layout keeps in memory, and layouts that keep no more on a processor than it has."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster
from tatami.tiling.layout import Column, Layout
from tatami.tiling.speeds import at_equal_times
from tatami.workload import Workload

Vector = NDArray[np.float64]

_BISECTIONS = 20
_STEPS = 7
_CUTS = 25
"""So many times limits are lowered because whole samples and units keep more than the fractions they come from."""
_MARGIN = 1.02


def memory_bytes(layout: Layout, *, workload: Workload) -> dict[str, float]:
    """What every processor keeps, in whole samples and units; nothing where it has no work.

    Weights with their gradients and the optimizer's state, those of its units and those that every rank repeats; and what its
    samples leave behind in the forward pass for the backward pass.
    """
    kept: dict[str, float] = {}
    for block, _ in workload.kinds:
        Column.cut_together(layout.columns, block.units)
    for column, samples in zip(layout.columns, layout.sample_sizes(workload.samples), strict=True):
        own = [workload.replicated_state_bytes + samples * workload.replicated_activation_bytes] * len(column.processors)
        works = [not workload.blocks] * len(column.processors)
        for block, count in workload.kinds:
            unit_bytes = workload.unit_state_bytes(block) + samples * block.unit_activation_bytes
            for index, size in enumerate(column.unit_sizes(block.units)):
                if size:
                    own[index] += count * (size * unit_bytes + samples * block.sample_activation_bytes)
                    works[index] = True
        for name, bytes_, work in zip(column.processors, own, works, strict=True):
            kept[name] = bytes_ if work and samples else 0.0
    return kept


def lacking_bytes(layout: Layout, *, cluster: Cluster, workload: Workload) -> dict[str, float]:
    """By how much each processor that has too little memory has too little."""
    if not any(processor.memory_bytes is not None for processor in cluster.processors):
        return {}
    by_name = cluster.by_name
    lacking = {}
    for name, kept in memory_bytes(layout, workload=workload).items():
        given = by_name[name].memory_bytes
        if given is not None and kept > given:
            lacking[name] = kept - given
    return lacking


def squeezed(layout: Layout, *, cluster: Cluster, workload: Workload) -> Layout | None:
    """The same processors in the same columns, as fast as their memory allows; None where it does not hold the network at all.

    A tile of width w and height h keeps A + P h + w (B + Q h): A for what every rank repeats, P for the weights of all units, B
    and Q for what a batch leaves behind, beside the units and with all of them. So memory limits the height for a width, as a
    time T does: w (F h + G) / v <= T. Both limits fall with w; the widest that a column can be within T is found by bisection,
    and so is the least T in which the columns together are as wide as the batch.
    """
    cluster = at_equal_times(cluster, workload=workload)
    limits = np.array([_given_bytes(cluster, name) for name in layout.processors])
    lowered = limits.copy()
    for _ in range(_CUTS):
        found = _Squeeze(layout, limits=lowered, cluster=cluster, workload=workload).layout()
        if found is None:
            return None
        kept = np.array(list(memory_bytes(found, workload=workload).values()))
        over = kept > limits
        if not over.any():
            return found
        lowered[over] -= _MARGIN * (kept - limits)[over]
    return None


def _given_bytes(cluster: Cluster, name: str) -> float:
    given = cluster.by_name[name].memory_bytes
    return inf if given is None else float(given)


class _Squeeze:
    """One layout's processors as vectors, one after the other as they lie; `starts` are the first of each column."""

    def __init__(self, layout: Layout, *, limits: Vector, cluster: Cluster, workload: Workload) -> None:
        self._layout = layout
        counts = [len(column.processors) for column in layout.columns]
        self._starts = np.cumsum([0, *counts[:-1]])
        self._column = np.repeat(np.arange(len(counts)), counts)
        self._speeds = np.array([cluster.by_name[name].speed for name in layout.processors])
        self._room = limits - workload.replicated_state_bytes
        self._unit_bytes = sum(count * block.units * workload.unit_state_bytes(block) for block, count in workload.kinds)
        beside_bytes = sum(count * block.sample_activation_bytes for block, count in workload.kinds)
        self._beside_bytes = workload.samples * (workload.replicated_activation_bytes + beside_bytes)
        self._area_bytes = workload.samples * sum(
            count * block.unit_activation_bytes * block.units for block, count in workload.kinds
        )
        self._area_flop = workload.flop_per_area
        self._width_flop = workload.flop_per_width

    def layout(self) -> Layout | None:
        """The fastest within the limits, in fractions."""
        none = np.zeros(len(self._starts))
        widest = self._widest(None, low=none, high=np.ones(len(self._starts)), steps=_BISECTIONS)
        if widest.sum() < 1:
            return None
        # Within this time all can be as wide as memory allows; the least time lies between it and none.
        fastest, slowest = 0.0, self._time(widest)
        narrow, wide = none, widest
        for _ in range(_BISECTIONS):
            middle = (fastest + slowest) / 2
            # As the bracket of times narrows, so does that of widths: a few steps keep up with it.
            widths = self._widest(middle, low=narrow, high=wide, steps=_STEPS)
            if widths.sum() >= 1:
                slowest, wide = middle, widths
            else:
                fastest, narrow = middle, widths
        widths = wide / wide.sum()
        parts = np.split(self._heights(widths), self._starts[1:])
        return Layout(
            columns=tuple(
                Column(width=float(width), processors=column.processors, heights=tuple(map(float, own)))
                for column, width, own in zip(self._layout.columns, widths, parts, strict=True)
            )
        )

    def _time(self, widths: Vector) -> float:
        """In which each column of these widths is done, however its heights are shared out within memory."""
        return float((widths * (self._area_flop + self._width_flop) / np.minimum.reduceat(self._speeds, self._starts)).max())

    def _limit(self, widths: Vector) -> Vector:
        """The greatest height for which each processor has memory, its column having this width."""
        w = widths[self._column]
        room = self._room - w * self._beside_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            limit = room / (self._unit_bytes + w * self._area_bytes)
        # Without blocks there is nothing that a lesser height would save.
        return np.clip(np.where(room < 0, 0.0, np.where(np.isnan(limit), 1.0, limit)), 0.0, 1.0)

    def _quick(self, widths: Vector, times: Vector) -> Vector:
        """The greatest height that each processor computes in its column's time."""
        w, time = widths[self._column], times[self._column]
        with np.errstate(divide="ignore", invalid="ignore"):
            height = (time * self._speeds / w - self._width_flop) / self._area_flop
        return np.clip(np.where(np.isnan(height), 1.0, height), 0.0, 1.0)

    def _sums(self, heights: Vector) -> Vector:
        sums: Vector = np.add.reduceat(heights, self._starts)
        return sums

    def _widest(self, time: float | None, *, low: Vector, high: Vector, steps: int) -> Vector:
        """How wide each column can be within its memory and this time; between `low`, which can be, and `high`."""
        for _ in range(steps):
            middle = (low + high) / 2
            fits = self._possible(middle, time)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return np.where(self._possible(high, time), high, low)

    def _possible(self, widths: Vector, time: float | None) -> NDArray[np.bool_]:
        heights = self._limit(widths)
        if time is not None:
            heights = np.minimum(heights, self._quick(widths, np.full(len(widths), time)))
        return self._sums(heights) >= 1

    def _heights(self, widths: Vector) -> Vector:
        """Those of equal time in every column, as far as memory allows; they sum to 1."""
        limit = self._limit(widths)
        low = np.zeros(len(widths))
        high = widths * (self._area_flop + self._width_flop) / np.minimum.reduceat(self._speeds, self._starts)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            fits = self._sums(np.minimum(limit, self._quick(widths, middle))) >= 1
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        heights = np.minimum(limit, self._quick(widths, high))
        sums = self._sums(heights)
        # Nothing fits into a column of no width; its processors are left out, whatever their heights.
        counts = np.bincount(self._column)[self._column]
        return np.where(sums[self._column] > 0, heights / np.maximum(sums, 1e-300)[self._column], 1 / counts)
