"""What a layout keeps in memory, and layouts that keep no more on a processor than it has."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster
from tatami.tiling.layout import Column, Layout
from tatami.tiling.speeds import at_equal_times
from tatami.tiling.summing import summing_shares, transfer_rates
from tatami.tiling.traffic import RIDE_ALONG_ELEMENTS, is_one_vector
from tatami.workload import Workload

Vector = NDArray[np.float64]

_BISECTIONS = 20
_STEPS = 7
_CUTS = 25
"""So many times limits are lowered because whole samples and units keep more than the fractions they come from."""
_MARGIN = 1.02
_SUMMED_BYTES = 4
_UNITS_OVER = 1
"""So many units of a block a rank may sum beyond its part, as units are whole."""


def memory_bytes(
    layout: Layout, *, workload: Workload, cluster: Cluster | None = None, ranks: int | None = None
) -> dict[str, float]:
    """What every processor keeps, in whole samples and units; nothing where it has no work.

    Weights with their gradients, the optimizer's state and the Trainer's copy, those of its units and those that every rank
    repeats; what its samples leave behind in the forward pass for the backward pass; and the memory in which gradients travel
    between columns.

    Args:
        layout: who has how much.
        workload: of what.
        cluster: says who sums how much of the gradients; None: all alike.
        ranks: of the run; None: those of the cluster, or of the layout.
    """
    kept: dict[str, float] = {}
    messages = _Messages(layout, workload=workload, cluster=cluster, ranks=ranks)
    repeated_bytes = workload.replicated_state_bytes + messages.replicated_bytes
    for block, _ in workload.kinds:
        Column.cut_together(layout.columns, block.units)
    for column, samples in zip(layout.columns, layout.sample_sizes(workload.samples), strict=True):
        own = [repeated_bytes + samples * workload.replicated_activation_bytes] * len(column.processors)
        works = [not workload.blocks] * len(column.processors)
        for block, count in workload.kinds:
            unit_bytes = workload.unit_state_bytes(block) + samples * block.unit_activation_bytes
            for index, size in enumerate(column.unit_sizes(block.units)):
                if size:
                    sent_bytes = block.unit_parameters * messages.unit_bytes(column.processors[index], units=size)
                    own[index] += count * (size * unit_bytes + samples * block.sample_activation_bytes + sent_bytes)
                    works[index] = True
        for name, bytes_, work in zip(column.processors, own, works, strict=True):
            kept[name] = bytes_ if work and samples else 0.0
    return kept


class _Messages:
    """What ranks keep of gradients so that they can travel between columns, as `HorizontalExchange` lays them out.

    Where each rank is a column, gradients are one vector, and what comes of others lies beside it. Otherwise all units lie
    together once more, what goes out and what comes has memory of its own, and so have replicated gradients: few ride with the
    messages, many are summed apart, as a vector. What is rounded on its way is there in both precisions.
    """

    def __init__(self, layout: Layout, *, workload: Workload, cluster: Cluster | None, ranks: int | None) -> None:
        self._columns = columns = len(layout.columns)
        names = layout.processors
        ranks = ranks or (len(names) if cluster is None else cluster.size)
        self._is_vector = is_one_vector(columns=columns, tiles=len(names), ranks=ranks, blocks=len(workload.blocks))
        # Half precision is summed as float32.
        self._element_bytes = max(workload.element_bytes, _SUMMED_BYTES)
        self._wire = 1.0 if workload.wire is None else workload.wire_bytes / self._element_bytes
        self._rounds = workload.wire is not None
        rates = None if cluster is None else transfer_rates(cluster)
        heights = [height for column in layout.columns for height in column.heights]
        self._parts = _most_summed(layout, summing_shares(heights, names, columns=columns, rates=rates))
        size_bytes = workload.replicated_parameters * self._element_bytes
        self.replicated_bytes = 0.0
        """Of the gradients that all ranks of a column have."""
        if columns > 1 and self._is_vector:
            self.replicated_bytes = self._vector(max(self._parts.values())) * size_bytes
        elif columns > 1 and workload.replicated_parameters <= RIDE_ALONG_ELEMENTS:
            self.replicated_bytes = (2 + self._wire * (columns + ranks - 2)) * size_bytes
        elif columns > 1:
            self.replicated_bytes = 3 * size_bytes

    def unit_bytes(self, name: str, *, units: int) -> float:
        """For each element that a unit of a block has, where `name` has `units` of it.

        Of what it sums, C - 1 others send theirs and get the sums; the rest goes out, and comes back summed. With two columns
        all goes out and comes once.
        """
        if self._columns == 1:
            return 0.0
        if self._is_vector:
            return units * self._vector(self._parts[name]) * self._element_bytes
        summed = 0.0 if self._columns == 2 else min(units, units * self._parts[name] + _UNITS_OVER)
        return (units + self._wire * 2 * (units + (self._columns - 2) * summed)) * self._element_bytes

    def _vector(self, part: float) -> float:
        """The same for each element of a vector, of which `part` is summed; what goes out is packed where it is rounded."""
        if self._columns == 2:
            return 1 + (2 * self._wire if self._rounds else 1)
        return 1 + (self._wire * (2 + (self._columns - 2) * part) if self._rounds else (self._columns - 1) * part)


def _most_summed(layout: Layout, shares: Mapping[str, float] | None) -> dict[str, float]:
    """Of every processor, the most of its units that it may have to sum: in proportion to `shares` with the owners of a group,
    of whom there is one in each column."""
    if shares is None:
        return dict.fromkeys(layout.processors, 1 / len(layout.columns))
    least = [min(shares[name] for name in column.processors) for column in layout.columns]
    found = {}
    for column, own in zip(layout.columns, least, strict=True):
        others = sum(least) - own
        for name in column.processors:
            found[name] = shares[name] / (shares[name] + others) if others > 0 else 1.0
    return found


def lacking_bytes(layout: Layout, *, cluster: Cluster, workload: Workload, ranks: int | None = None) -> dict[str, float]:
    """By how much each processor that has too little memory has too little; `ranks` as `memory_bytes` has them."""
    if not any(processor.memory_bytes is not None for processor in cluster.processors):
        return {}
    by_name = cluster.by_name
    lacking = {}
    for name, kept in memory_bytes(layout, workload=workload, cluster=cluster, ranks=ranks).items():
        given = by_name[name].memory_bytes
        if given is not None and kept > given:
            lacking[name] = kept - given
    return lacking


def squeezed(layout: Layout, *, cluster: Cluster, workload: Workload, ranks: int | None = None) -> Layout | None:
    """The same processors in the same columns, as fast as their memory allows; None where it does not hold the network at all.

    A tile of width w and height h keeps A + P h + w (B + Q h): A for what every rank repeats, P for all units' weights and the
    messages with their gradients, B and Q for what a batch leaves behind, beside the units and with all of them. So memory
    limits the height for a width, as a time T does: w (F h + G) / v <= T. Both limits fall with w; the widest that a column can
    be within T is found by bisection, and so is the least T in which the columns together are as wide as the batch.
    """
    cluster = at_equal_times(cluster, workload=workload)
    messages = _Messages(layout, workload=workload, cluster=cluster, ranks=ranks)
    limits = np.array([_given_bytes(cluster, name) for name in layout.processors])
    lowered = limits.copy()
    for _ in range(_CUTS):
        found = _Squeeze(layout, limits=lowered, cluster=cluster, workload=workload, messages=messages).layout()
        if found is None:
            return None
        kept = np.array(list(memory_bytes(found, workload=workload, cluster=cluster, ranks=ranks).values()))
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

    def __init__(self, layout: Layout, *, limits: Vector, cluster: Cluster, workload: Workload, messages: _Messages) -> None:
        self._layout = layout
        counts = [len(column.processors) for column in layout.columns]
        self._starts = np.cumsum([0, *counts[:-1]])
        self._column = np.repeat(np.arange(len(counts)), counts)
        self._speeds = np.array([cluster.by_name[name].speed for name in layout.processors])
        self._room = limits - workload.replicated_state_bytes - messages.replicated_bytes
        state_bytes = sum(count * block.units * workload.unit_state_bytes(block) for block, count in workload.kinds)
        sent_bytes = [
            sum(count * block.unit_parameters * messages.unit_bytes(name, units=block.units) for block, count in workload.kinds)
            for name in layout.processors
        ]
        self._unit_bytes = state_bytes + np.array(sent_bytes)
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
