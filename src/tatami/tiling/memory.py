"""What a layout keeps in memory, and layouts that keep no more on a processor than it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster
from tatami.tiling.layout import Layout
from tatami.tiling.sharding import num_rounds, shard_shares, with_even_part
from tatami.tiling.speeds import at_equal_times
from tatami.tiling.summing import summing_shares, transfer_rates
from tatami.tiling.traffic import RIDE_ALONG_ELEMENTS, is_one_vector
from tatami.workload import Workload

Vector = NDArray[np.float64]

_FINE, _COARSE = (20, 7), (14, 4)
"""Bisections of times, and of widths for each of them: for few processors, and for more than `_FEW`."""
_FEW = 32
_CUTS = 25
"""So many times limits are lowered because whole samples and units keep more than the fractions they come from."""
_MARGIN, _FASTER = 1.02, 2.0
"""What exceeds a limit is taken off it; of many processors twice as much each time."""
_TINY = 1e-9
"""Bytes, flop, or a width, which make nothing of nothing all of it."""
_SUMMED_BYTES = 4
_UNITS_OVER = 1
"""So many units of a block a rank may sum beyond its part, as units are whole."""


def memory_bytes(
    layout: Layout, *, workload: Workload, cluster: Cluster | None = None, ranks: int | None = None
) -> dict[str, float]:
    """What every processor keeps, in whole samples and units; nothing where it has no work.

    Weights with the optimizer's state and the Trainer's copy, those of its units and those that every rank repeats; the memory
    in which gradients travel between replicas; of what is sharded, its share (`optimizer_shares`). To this comes the most of
    what passes: at some moment of the backward pass (`Workload.backward_moments`) gradients, and what the samples of its
    largest micro-batch left behind in the forward pass; or, when all gradients are there, the memory in which the optimizer
    computes the update of the largest weight. A loop that keeps gradients from one iteration to the next, as
    `zero_grad(set_to_none=False)` does, has all of them there all along, and may need as much more. Where a replica recomputes
    its activations they are those of `Workload.recomputing`.

    Args:
        layout: who has how much.
        workload: of what.
        cluster: says who sums how much of the gradients; None: all alike.
        ranks: of the run; None: those of the cluster, or of the layout.
    """
    kept = _kept_bytes(layout, workload=workload, cluster=cluster, ranks=ranks)
    return dict(zip(layout.processors, kept.tolist(), strict=True))


def _kept_bytes(layout: Layout, *, workload: Workload, cluster: Cluster | None, ranks: int | None) -> Vector:
    """`memory_bytes` as a vector, in the order of the layout's processors."""
    kept = _unsharded(layout, workload=workload, cluster=cluster, ranks=ranks)
    if workload.sharded_state_bytes:
        shares = optimizer_shares(layout, workload=workload, cluster=cluster, ranks=ranks)
        kept += workload.sharded_state_bytes * np.array([shares[name] for name in layout.processors])
    return kept


def optimizer_shares(
    layout: Layout, *, workload: Workload, cluster: Cluster | None = None, ranks: int | None = None
) -> dict[str, float]:
    """Each processor's share of the weights that it updates where the optimizer is sharded: by speed, within memory.

    Arguments are those of `memory_bytes`.
    """
    names = layout.processors
    if cluster is None:
        return dict.fromkeys(names, 1 / len(names))
    kept = _unsharded(layout, workload=workload, cluster=cluster, ranks=ranks)
    rooms = (_limits(layout, cluster=cluster) - kept - 1.0).tolist()  # a byte less: shares that fill a room are rounded
    speeds = [cluster.by_name[name].speed for name in names]
    shares = shard_shares(speeds, rooms_bytes=rooms, size_bytes=workload.sharded_state_bytes)
    if workload.tied_parameters:
        shares = with_even_part(shares, workload.tied_parameters / workload.replicated_parameters)
    return dict(zip(names, shares, strict=True))


def _unsharded(layout: Layout, *, workload: Workload, cluster: Cluster | None, ranks: int | None) -> Vector:
    """What every processor keeps beside its shard of the optimizer's state."""
    amounts = _Amounts(layout, workload=workload, cluster=cluster, ranks=ranks)
    counts = np.diff(layout.starts, append=len(layout.processors))
    sizes = np.array(layout.sample_sizes(workload.samples))
    numbers = np.clip([replica.micro_batches for replica in layout.replicas], 1, np.maximum(sizes, 1))
    largest = np.repeat(-(-sizes // numbers), counts)
    passing_bytes = amounts.passing_bytes(largest, is_whole=np.repeat(numbers == 1, counts))
    return np.where(amounts.works & (largest > 0), amounts.lasting_bytes + passing_bytes, 0.0)


class _Amounts:
    """What all processors of a layout keep.

    Attributes:
        lasting_bytes: at all times, however many samples they have.
        gradient_bytes: when the backward pass is over.
        update_bytes: for a while in the optimizer's step, when activations are gone.
        sample_bytes: for each sample of a micro-batch, between forward and backward pass.
        most_kept: the most that is there of these at any moment of the backward pass, as a part of them.
        works: whether they have units.
    """

    def __init__(self, layout: Layout, *, workload: Workload, cluster: Cluster | None, ranks: int | None) -> None:
        self._workload = workload
        messages = _Messages(layout, workload=workload, cluster=cluster, ranks=ranks)
        members = len(layout.processors)
        self.lasting_bytes = np.full(members, float(workload.replicated_state_bytes + messages.replicated_bytes))
        self.gradient_bytes = np.full(members, float(workload.replicated_gradient_bytes))
        self.update_bytes = np.full(members, float(workload.replicated_update_bytes))
        self.works = np.full(members, not workload.blocks)
        for block, count in workload.kinds:
            sizes = layout.unit_sizes(block.units)
            sent_bytes = block.unit_parameters * messages.unit_bytes(sizes)
            self.lasting_bytes += count * (sizes * workload.unit_state_bytes(block) + sent_bytes)
            self.gradient_bytes += count * sizes * workload.unit_gradient_bytes(block)
            np.maximum(self.update_bytes, sizes * workload.unit_update_bytes(block), out=self.update_bytes)
            self.works |= sizes > 0
        self.sample_bytes = _sample_bytes(layout, workload)
        self.most_kept = np.full(members, max(kept for kept, _ in workload.backward_moments))
        counts = np.diff(layout.starts, append=members)
        self._again = np.repeat([replica.recomputes for replica in layout.replicas], counts)
        if self._again.any():
            self.sample_bytes = np.where(self._again, _sample_bytes(layout, workload.recomputing), self.sample_bytes)
            self.most_kept[self._again] = 1.0
        self.lasting_bytes -= self.gradient_bytes

    def passing_bytes(self, samples: NDArray[np.int64], *, is_whole: NDArray[np.bool_]) -> Vector:
        """What is there beside `lasting_bytes` when memory is fullest, with so many samples in a micro-batch.

        Args:
            samples: for each processor.
            is_whole: whether these are all that it has.
        """
        kept_bytes = samples * self.sample_bytes
        moments = [kept * kept_bytes + there * self.gradient_bytes for kept, there in self._workload.backward_moments]
        in_parts = self.most_kept * kept_bytes + self.gradient_bytes
        fullest = np.where(is_whole & ~self._again, np.max(moments, axis=0), in_parts)
        # Activations are gone when the optimizer needs memory.
        passing_bytes: Vector = np.maximum(fullest, self.gradient_bytes + self.update_bytes)
        return passing_bytes


def _sample_bytes(layout: Layout, workload: Workload) -> Vector:
    """What each processor keeps of a sample between forward and backward pass."""
    found = np.full(len(layout.processors), float(workload.replicated_activation_bytes))
    for block, count in workload.kinds:
        sizes = layout.unit_sizes(block.units)
        beside_bytes = np.where(sizes > 0, block.sample_activation_bytes, 0.0)
        found += count * (sizes * block.unit_activation_bytes + beside_bytes)
    return found


def in_fewest_micro_batches(layout: Layout, *, cluster: Cluster, workload: Workload, ranks: int | None = None) -> Layout | None:
    """The same shares in as few micro-batches as every replica's memory allows; None where one sample at a time is too much.

    `Workload.micro_batches` and networks that allow only one (`Workload.most_micro_batches`) are kept to, and so is
    `Workload.recompute` where it is true.
    """
    if workload.recompute:
        layout = layout.recomputing()
    if workload.micro_batches is not None:
        layout = layout.in_micro_batches(workload.micro_batches)
        return None if lacking_bytes(layout, cluster=cluster, workload=workload, ranks=ranks) else layout
    if not cluster.memory_known:
        return layout
    amounts = _Amounts(layout, workload=workload, cluster=cluster, ranks=ranks)
    samples = np.array(layout.sample_sizes(workload.samples))
    limits = _limits(layout, cluster=cluster) - amounts.lasting_bytes
    own = np.repeat(samples, np.diff(layout.starts, append=len(limits)))
    works = amounts.works & (own > 0)
    room_bytes = limits - amounts.gradient_bytes
    if (room_bytes < amounts.update_bytes)[works].any():
        return None
    held = own.astype(np.float64)
    tight = works & (amounts.passing_bytes(own, is_whole=np.full(len(own), True)) > limits)
    # Some member's lack makes several micro-batches of its replica's samples.
    replica_tight = np.repeat(np.logical_or.reduceat(tight, layout.starts), np.diff(layout.starts, append=len(limits)))
    sample_bytes = amounts.sample_bytes * amounts.most_kept
    tight = works & replica_tight & (sample_bytes * own > room_bytes)
    held[tight] = room_bytes[tight] // sample_bytes[tight]
    most = np.minimum.reduceat(held, layout.starts)
    if (most[samples > 0] < 1).any():
        return None
    numbers = np.ceil(samples / np.maximum(most, 1)).clip(1).astype(int).tolist()
    if max(numbers) > workload.most_micro_batches:
        return None
    while True:
        if numbers != [replica.micro_batches for replica in layout.replicas]:
            pairs = zip(layout.replicas, numbers, strict=True)
            layout = Layout(replicas=tuple(replica.in_micro_batches(number) for replica, number in pairs))
        # The shards of an optimizer's state take the room that is left, so it is the sum over all ranks that must do.
        if not workload.sharded_state_bytes or not lacking_bytes(layout, cluster=cluster, workload=workload, ranks=ranks):
            return layout
        most_numbers = [min(int(own), workload.most_micro_batches) for own in samples.clip(1)]
        if numbers == most_numbers:
            return None
        numbers = [min(2 * number, own) for number, own in zip(numbers, most_numbers, strict=True)]


class _Messages:
    """What ranks keep of gradients so that they can travel between replicas, as `GradientExchange` lays them out.

    Where each rank is a replica, gradients are one vector, and what comes of others lies beside it. Otherwise all units lie
    together once more, what goes out and what comes has memory of its own, and so have replicated gradients: few ride with the
    messages, many are summed apart, as a vector. What is rounded on its way is there in both precisions.
    """

    def __init__(self, layout: Layout, *, workload: Workload, cluster: Cluster | None, ranks: int | None) -> None:
        self._replicas = replicas = len(layout.replicas)
        names = layout.processors
        ranks = ranks or (len(names) if cluster is None else cluster.size)
        self._is_vector = is_one_vector(replicas=replicas, tiles=len(names), ranks=ranks, blocks=len(workload.blocks))
        # Half precision is summed as float32.
        self._element_bytes = max(workload.element_bytes, _SUMMED_BYTES)
        self._wire = 1.0 if workload.wire is None else workload.wire_bytes / self._element_bytes
        self._rounds = workload.wire is not None
        rates = None if cluster is None else transfer_rates(cluster)
        shares = summing_shares(layout.heights.tolist(), names, replicas=replicas, rates=rates)
        self._parts = _most_summed(layout, shares)
        size_bytes = workload.replicated_parameters * self._element_bytes
        self.replicated_bytes = 0.0
        """Bytes of the gradients that all ranks of a replica have."""
        if replicas > 1 and workload.sharded_state_bytes:
            # Of two rounds what goes out and what comes, in which the largest share counts as an equal one.
            self.replicated_bytes = 4 * size_bytes / num_rounds(size_bytes)
        elif replicas > 1 and self._is_vector:
            self.replicated_bytes = float(self._vector(self._parts).max()) * size_bytes
        elif replicas > 1 and workload.replicated_parameters <= RIDE_ALONG_ELEMENTS:
            self.replicated_bytes = (2 + self._wire * (replicas + ranks - 2)) * size_bytes
        elif replicas > 1:
            self.replicated_bytes = 3 * size_bytes

    def unit_bytes(self, units: NDArray[np.int64]) -> Vector:
        """For each element that a unit of a block has, where the processors have so many `units` of it.

        Of what it sums, C - 1 others send theirs and get the sums; the rest goes out, and comes back summed. With two replicas
        all goes out and comes once.
        """
        if self._replicas == 1:
            return np.zeros(len(units))
        if self._is_vector:
            return units * self._vector(self._parts) * self._element_bytes
        summed = 0.0 if self._replicas == 2 else np.minimum(units, units * self._parts + _UNITS_OVER)
        return (units + self._wire * 2 * (units + (self._replicas - 2) * summed)) * self._element_bytes

    def _vector(self, parts: Vector) -> Vector:
        """The same for each element of a vector, of which `parts` are summed; what goes out is packed where it is rounded."""
        if self._replicas == 2:
            return np.full(len(parts), 1 + (2 * self._wire if self._rounds else 1))
        return 1 + (self._wire * (2 + (self._replicas - 2) * parts) if self._rounds else (self._replicas - 1) * parts)


def _most_summed(layout: Layout, shares: Mapping[str, float] | None) -> Vector:
    """The most of its units that each processor may have to sum: in proportion to `shares` with the owners of a group,
    of whom there is one in each replica."""
    members = len(layout.processors)
    if shares is None:
        return np.full(members, 1 / len(layout.replicas))
    own = np.array([shares[name] for name in layout.processors])
    least = np.minimum.reduceat(own, layout.starts)
    others = np.repeat(least.sum() - least, np.diff(layout.starts, append=members))
    most: Vector = np.divide(own, own + others, out=np.ones(members), where=others > 0)
    return most


def lacking_bytes(layout: Layout, *, cluster: Cluster, workload: Workload, ranks: int | None = None) -> dict[str, float]:
    """By how much each processor that has too little memory has too little; `ranks` as `memory_bytes` has them."""
    if not cluster.memory_known:
        return {}
    lacking = _kept_bytes(layout, workload=workload, cluster=cluster, ranks=ranks) - _limits(layout, cluster=cluster)
    return {layout.processors[index]: float(lacking[index]) for index in np.flatnonzero(lacking > 0).tolist()}


def can_hold(layout: Layout, *, cluster: Cluster, workload: Workload, ranks: int | None = None) -> bool:
    """Whether the memory of every replica holds the network with one sample, at some heights: quickly found."""
    workload = workload.recomputing if workload.may_recompute else workload
    messages = _Messages(layout, workload=workload, cluster=cluster, ranks=ranks)
    limits = _limits(layout, cluster=cluster)
    squeeze = _Squeeze(layout, limits=limits, cluster=cluster, workload=workload, messages=messages)
    return bool(squeeze.holds(np.full(len(layout.replicas), 1 / workload.samples)).all())


def squeezed(layout: Layout, *, cluster: Cluster, workload: Workload, ranks: int | None = None) -> Layout | None:
    """The same processors in the same replicas, as fast as their memory allows; None where it does not hold the network at all.

    A tile of width w and height h in k micro-batches keeps A + P h + w (B + Q h) / k: A for what every rank repeats, P for all
    units' weights and the messages with their gradients, B and Q for what a batch leaves behind, beside the units and with all
    of them; in one micro-batch the most of several such sums, with parts of the gradients and of what is left behind
    (`Workload.backward_moments`). The number of micro-batches of a replica does not change here. So memory
    limits the height for a width, as a time T does: w (F h + G) / v <= T. Both limits fall with w; the widest that a replica
    can be within T is found by bisection, and so is the least T in which the replicas together are as wide as the batch.
    """
    cluster = at_equal_times(cluster, workload=workload)
    counted = workload.recomputing if len(layout.recomputes) == len(layout.processors) else workload
    messages = _Messages(layout, workload=workload, cluster=cluster, ranks=ranks)
    limits = _limits(layout, cluster=cluster)
    lowered = limits.copy()
    margin = _MARGIN
    for _ in range(_CUTS):
        found = _Squeeze(layout, limits=lowered, cluster=cluster, workload=counted, messages=messages).layout()
        if found is None:
            return None
        kept = _kept_bytes(found, workload=workload, cluster=cluster, ranks=ranks)
        over = kept > limits
        if not over.any():
            return found
        lowered[over] -= margin * (kept - limits)[over]
        margin *= 1.0 if len(limits) <= _FEW else _FASTER
    return None


def _limits(layout: Layout, *, cluster: Cluster) -> Vector:
    """What the processors have; infinite where that is not known."""
    return np.array(list(map(cluster.memory_bytes.__getitem__, layout.processors)))


class _Squeeze:
    """One layout's processors as vectors, one after the other as they lie; `starts` are the first of each replica."""

    def __init__(self, layout: Layout, *, limits: Vector, cluster: Cluster, workload: Workload, messages: _Messages) -> None:
        self._layout = layout
        counts = [len(replica.processors) for replica in layout.replicas]
        self._bisections, self._steps = _FINE if len(limits) <= _FEW else _COARSE
        self._starts = np.cumsum([0, *counts[:-1]])
        self._replica = np.repeat(np.arange(len(counts)), counts)
        self._speeds = np.array(list(map(cluster.speeds.__getitem__, layout.processors)))
        self._area_flop, self._width_flop = workload.flop_per_area, workload.flop_per_width
        gradient_bytes = sum(count * block.units * workload.unit_gradient_bytes(block) for block, count in workload.kinds)
        room = limits - workload.replicated_state_bytes - messages.replicated_bytes
        state_bytes = sum(count * block.units * workload.unit_state_bytes(block) for block, count in workload.kinds)
        unit_bytes = np.full(len(limits), float(state_bytes))
        for block, count in workload.kinds:
            unit_bytes += count * block.unit_parameters * messages.unit_bytes(np.full(len(limits), block.units))
        # In the optimizer's step there are all gradients, and work space for the largest weight in place of activations.
        unit_update_bytes = [block.units * workload.unit_update_bytes(block) for block, _ in workload.kinds]
        self._updated: Vector = np.minimum(
            _heights_in(room - workload.replicated_update_bytes, unit_bytes),
            _heights_in(room, unit_bytes + max(unit_update_bytes, default=0.0)),
        )
        beside_bytes = sum(count * block.sample_activation_bytes for block, count in workload.kinds)
        area_bytes = sum(count * block.unit_activation_bytes * block.units for block, count in workload.kinds)
        # A micro-batch has one sample at least, and of several one meets gradients of those before it. A row for each moment.
        self._parts = 1 / np.array([replica.micro_batches for replica in layout.replicas])
        in_parts = self._parts < 1
        self._least_width = np.where(in_parts, 1 / workload.samples, 0.0)
        most_kept = max(kept for kept, _ in workload.backward_moments)
        moments = [(most_kept, 1.0)] if in_parts.all() else workload.backward_moments
        kept, there = np.where(in_parts[self._replica], [[[most_kept]], [[1.0]]], np.array(moments).T[:, :, None])
        self._room = room + (1 - there) * workload.replicated_gradient_bytes
        self._unit_bytes = unit_bytes - (1 - there) * gradient_bytes
        self._beside_bytes = kept * workload.samples * (workload.replicated_activation_bytes + beside_bytes)
        self._area_bytes = kept * workload.samples * area_bytes

    def layout(self) -> Layout | None:
        """The fastest within the limits, in fractions."""
        none = np.zeros(len(self._starts))
        widest = self._widest(None, low=none, high=np.ones(len(self._starts)), steps=self._bisections)
        if widest.sum() < 1:
            return None
        # Within this time all can be as wide as memory allows; the least time lies between it and none.
        fastest, slowest = 0.0, self._time(widest)
        narrow, wide = none, widest
        for _ in range(self._bisections):
            middle = (fastest + slowest) / 2
            # As the bracket of times narrows, so does that of widths: a few steps keep up with it.
            widths = self._widest(middle, low=narrow, high=wide, steps=self._steps)
            if widths.sum() >= 1:
                slowest, wide = middle, widths
            else:
                fastest, narrow = middle, widths
        widths = wide / wide.sum()
        heights, starts = self._heights(widths).tolist(), self._starts.tolist()
        return Layout(
            replicas=tuple(
                replace(replica, width=width, heights=tuple(heights[start : start + len(replica.processors)]))
                for replica, width, start in zip(self._layout.replicas, widths.tolist(), starts, strict=True)
            )
        )

    def _time(self, widths: Vector) -> float:
        """Time in which each replica of these widths is done, with its best heights within memory."""
        return float((widths * (self._area_flop + self._width_flop) / np.minimum.reduceat(self._speeds, self._starts)).max())

    def _limit(self, widths: Vector) -> Vector:
        """The greatest height for which each processor has memory, its replica having this width."""
        w = np.maximum(widths * self._parts, self._least_width)[self._replica]
        heights = _heights_in(self._room - w * self._beside_bytes, self._unit_bytes + w * self._area_bytes)
        limit: Vector = np.minimum(self._updated, heights.min(axis=0))
        return limit

    def _quick(self, widths: Vector, times: Vector) -> Vector:
        """The greatest height that each processor computes in its replica's time."""
        flop = (times / np.maximum(widths, _TINY))[self._replica] * self._speeds
        return _heights_in(flop - self._width_flop, self._area_flop)

    def _sums(self, heights: Vector) -> Vector:
        sums: Vector = np.add.reduceat(heights, self._starts)
        return sums

    def _widest(self, time: float | None, *, low: Vector, high: Vector, steps: int) -> Vector:
        """How wide each replica can be within its memory and this time; between `low`, which can be, and `high`."""
        for _ in range(steps):
            middle = (low + high) / 2
            fits = self.holds(middle, time)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return np.where(self.holds(high, time), high, low)

    def holds(self, widths: Vector, time: float | None = None) -> NDArray[np.bool_]:
        """Whether replicas of these widths have memory for the network, and time."""
        heights = self._limit(widths)
        if time is not None:
            heights = np.minimum(heights, self._quick(widths, np.full(len(widths), time)))
        return self._sums(heights) >= 1

    def _heights(self, widths: Vector) -> Vector:
        """Heights of equal time in every replica, as far as memory allows; they sum to 1."""
        limit = self._limit(widths)
        low = np.zeros(len(widths))
        high = widths * (self._area_flop + self._width_flop) / np.minimum.reduceat(self._speeds, self._starts)
        for _ in range(self._bisections):
            middle = (low + high) / 2
            fits = self._sums(np.minimum(limit, self._quick(widths, middle))) >= 1
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        heights = np.minimum(limit, self._quick(widths, high))
        sums = self._sums(heights)
        # Nothing fits into a replica of no width; its processors are left out, whatever their heights.
        counts = np.bincount(self._replica)[self._replica]
        return np.where(sums[self._replica] > 0, heights / np.maximum(sums, 1e-300)[self._replica], 1 / counts)


def _heights_in(room: Vector, unit: Vector | float) -> Vector:
    """The greatest heights that fit, in bytes or in flop; where there are no blocks, a lesser height would save nothing."""
    heights: Vector = np.minimum(np.maximum((room + _TINY) / (unit + _TINY), 0.0), 1.0)
    return heights
