"""Which machine computes which pieces: cutting a network into stages for machines of unequal speed, memory and links.

How long a pipeline takes, T, is in `tatami.tiling.pipeline_flow`: the time tau of the slowest stage, or link, for each
micro-batch, and the time in which the pipeline fills and drains. Where sends block, it is
sum_i t_i + 2 sum_i c_i + (m - 1) tau, with m micro-batches, the time t_i of one on stage i and a hand-over c_i behind it.
Plans measured by the Sailor project took 4 to 6 % more where hand-overs are short, and 28 to 96 % more where they go over a
slow link and block (`benchmarks/sailor.py`). Stages are done with their last backward pass one after the other, the first one
last; gradient sums that take longer than that come on top.

For a given order of machines and a given tau, greedy filling is best: each stage takes as many pieces as it can compute within
tau. For a free order the problem is NP-complete (Pinar, Tabak, Aykanat, JPDC 68, 2008, section 5). Up to `EXACT` machines it is
solved by a table over the sets of machines: how far can the machines of this set, with that one at the end, get within tau
(`_reach`)? The least tau is found by bisection. More machines are put into the order of their speeds, neighbours by the best
link.

What these do not see, the time of filling, is then made better by moving single cuts, exchanging machines and leaving out
stages (`_polished`), under T itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from tatami.tiling.pipeline_flow import Floats, PipelineFlow

EXACT = 10
"""Largest number of machines whose order is found by the table over all sets: 10 take some tenths of a second."""
_STEPS = 16
"""Steps of the bisection: tau is then known to 2e-5 of its range."""
_POLISHED, _ROUNDS = 8, 60
"""So many candidates are polished, the fastest first, in so many steps at most."""
_QUICKLY_POLISHED, _QUICK_ROUNDS = 2, 6
_QUANTILES = (0.0, 0.5, 0.8)
"""Quantiles of the machines' links: those with slower ones are left out."""
_MOVED = 24
"""Most stages of a long pipeline that are exchanged for others in a step: those that take longest."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """Contiguous pieces, and the machine that computes them.

    Attributes:
        machine: its index.
        first, stop: the pieces from `first` up to, not including, `stop`.
    """

    machine: int
    first: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class PipelineTask:
    """One micro-batch's work, and the machines.

    Attributes:
        work_s: for each machine and each piece, seconds of its forward and backward pass over one micro-batch.
        step_s: for each machine, what a micro-batch costs however few pieces it has.
        message_s: for each machine, what each message costs it that it sends or receives; None: nothing.
        crossing_bytes: for each piece, what crosses a cut in front of it, in one direction, for one micro-batch.
        bandwidth_bytes_per_s, latency_s: of the link between each two machines.
        state_bytes: of each piece, whatever the micro-batch.
        activation_bytes: of each piece, for one micro-batch in flight.
        update_bytes: what the update of each piece's largest weight needs when activations are gone; None: nothing.
        memory_bytes: of each machine; infinite where there is no limit.
        micro_batches: how many there are.
        blocking: whether a stage waits while it sends: then tau = max_i (t_i + c_i).
        sum_s: for each machine, seconds for each byte of gradients that it sums with others; None: it sums none.
        gradient_bytes: of each piece.
        late_s: for each machine and each piece, the part of `work_s` that comes when the gradient of the input has left; None:
            nothing.
        tied: of each weight that two pieces read, the two and its bytes: where they are in two stages, these sum its gradients.
    """

    work_s: Floats
    step_s: Floats
    message_s: Floats | None = None
    crossing_bytes: Floats
    bandwidth_bytes_per_s: Floats
    latency_s: Floats
    state_bytes: Floats
    activation_bytes: Floats
    memory_bytes: Floats
    micro_batches: int
    blocking: bool = False
    sum_s: Floats | None = None
    gradient_bytes: Floats | None = None
    late_s: Floats | None = None
    update_bytes: Floats | None = None
    tied: tuple[tuple[int, int, float], ...] = ()

    @property
    def num_machines(self) -> int:
        return len(self.work_s)

    @property
    def num_pieces(self) -> int:
        return len(self.crossing_bytes)

    @cached_property
    def work_before_s(self) -> Floats:
        """For each machine, the work of all pieces in front of each piece, and of all of them at the end."""
        return np.pad(np.cumsum(self.work_s, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def late_before_s(self) -> Floats | None:
        """As `work_before_s`, of what is late."""
        return None if self.late_s is None else np.pad(np.cumsum(self.late_s, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def state_before_bytes(self) -> Floats:
        return np.pad(np.cumsum(self.state_bytes), (1, 0))

    @cached_property
    def activations_before_bytes(self) -> Floats:
        return np.pad(np.cumsum(self.activation_bytes), (1, 0))

    @cached_property
    def updating_bytes(self) -> Floats:
        """State of the pieces from each one on up to each other one, with the work space of an update; -inf for no pieces."""
        pieces, before = self.num_pieces, self.state_before_bytes
        found = np.full((pieces + 1, pieces + 1), -np.inf)
        updates = np.zeros(pieces) if self.update_bytes is None else self.update_bytes
        for first in range(pieces):
            found[first, first + 1 :] = before[first + 1 :] - before[first] + np.maximum.accumulate(updates[first:])
        return found

    @cached_property
    def updating_rows_bytes(self) -> list[list[float]]:
        """The same as lists, in which `bisect` is fast."""
        rows: list[list[float]] = self.updating_bytes.tolist()
        return rows

    def in_flight(self, num_stages: int) -> NDArray[np.int64]:
        """How many micro-batches each stage keeps the activations of, where it begins backward passes as soon as it can."""
        return np.minimum(np.arange(num_stages, 0, -1), self.micro_batches)

    def time_s(self, stages: Sequence[PipelineStage]) -> float:
        """T; infinite where the machines lack memory."""
        edges = [0, *(stage.stop for stage in stages)]
        return float(self.times_s(np.array([[stage.machine for stage in stages]]), np.array([edges]))[0])

    def times_s(self, machines: NDArray[np.int64], edges: NDArray[np.int64]) -> Floats:
        """T of many pipelines of the same number of stages p at once.

        Args:
            machines: (pipelines, p).
            edges: (pipelines, p + 1), from 0 to the number of pieces.
        """
        num_stages = machines.shape[1]
        first, stop = edges[:, :-1], edges[:, 1:]
        before = self.work_before_s
        computes = before[machines, stop] - before[machines, first] + self.step_s[machines]
        source, target, cut = machines[:, :-1], machines[:, 1:], stop[:, :-1]
        crosses = self.crossing_bytes[cut % self.num_pieces] / self.bandwidth_bytes_per_s[source, target]
        crosses = crosses + self.latency_s[source, target]
        if self.message_s is not None and num_stages > 1:
            messages = np.full(num_stages, 4.0)
            messages[[0, -1]] = 2.0
            computes = computes + messages * self.message_s[machines]
        behind = np.pad(crosses, ((0, 0), (0, 1)))
        late = np.zeros_like(computes)
        if self.late_before_s is not None:
            late[:, 1:] = (self.late_before_s[machines, stop] - self.late_before_s[machines, first])[:, 1:]
        flow = PipelineFlow(computes, late_s=late, behind_s=behind, micro_batches=self.micro_batches)
        state = self.state_before_bytes[stop] - self.state_before_bytes[first]
        activations = self.activations_before_bytes[stop] - self.activations_before_bytes[first]
        memory, plain = self.memory_bytes[machines], self.in_flight(num_stages)
        updates = self.updating_bytes[first, stop] <= memory

        def holds(micro_batches: NDArray[np.int64]) -> NDArray[np.bool_]:
            kept = np.minimum(micro_batches, self.micro_batches) * activations
            return np.asarray(((state + kept <= memory) & updates).all(axis=1))

        if self.blocking:
            tau = (computes + behind).max(axis=1)
            total = (computes - late).sum(axis=1) + 2 * crosses.sum(axis=1) + (self.micro_batches - 1) * tau
            early = flow.backs_s - late
        else:
            # As many in flight, and weights left, as is fastest, where memory holds them.
            left = flow.weights_left()
            filled, deep = flow.filled_in_flight(left), flow.deep_in_flight
            is_filled, is_deep = holds(filled + left), holds(deep)
            left = np.where(is_filled[:, None], left, 0)
            in_flight = np.where(is_filled[:, None], filled, np.where(is_deep[:, None], deep, plain))
            total, early = flow.total_s(in_flight, left), flow.early_s(left)
        if self.sum_s is not None or self.tied or self.late_s is not None:
            total = total + np.maximum((self._sums_s(machines, edges) - early).max(axis=1), 0.0)
        fits = holds(plain) & (first < stop).all(axis=1)
        return np.where(fits, total, np.inf)

    def _sums_s(self, machines: NDArray[np.int64], edges: NDArray[np.int64]) -> Floats:
        sums = np.zeros(machines.shape)
        if self.sum_s is not None and self.gradient_bytes is not None:
            gradients = np.pad(np.cumsum(self.gradient_bytes), (1, 0))
            sums += self.sum_s[machines] * (gradients[edges[:, 1:]] - gradients[edges[:, :-1]])
        rows = np.arange(len(machines))
        for one, other, size_bytes in self.tied:
            stages = [(edges[:, 1:-1] <= piece).sum(axis=1) for piece in (one, other)]
            source, target = (machines[rows, stage] for stage in stages)
            swapped_s = size_bytes / self.bandwidth_bytes_per_s[source, target] + self.latency_s[source, target]
            if self.message_s is not None:
                swapped_s = swapped_s + 2 * np.maximum(self.message_s[source], self.message_s[target])
            for stage in stages:  # the later of the two decides
                sums[rows, stage] += np.where(stages[0] != stages[1], swapped_s, 0.0)
        return sums


_Candidate = tuple[tuple[int, ...], tuple[int, ...]]
"""Machines of the stages, and edges of their pieces: one more."""


def best_pipeline(
    task: PipelineTask, *, fewest: int = 1, most: int | None = None, thorough: bool = True
) -> tuple[PipelineStage, ...] | None:
    """The stages of least T, on some of the machines; None where memory allows none.

    Args:
        fewest, most: how many stages there may be; None: as many as there are machines and pieces.
        thorough: whether the order of few machines is found by the table over all their sets, and more candidates are made
            better for longer; a tenth of the time otherwise.
    """
    most = min(task.num_machines, task.num_pieces) if most is None else min(most, task.num_machines, task.num_pieces)
    if fewest > most:
        return None
    candidates: list[_Candidate] = []
    if fewest == 1:
        candidates = [((machine,), (0, task.num_pieces)) for machine in range(task.num_machines)]
    candidates += _ordered(task, fewest=fewest, most=most, thorough=thorough)
    if thorough and task.num_machines <= EXACT:
        # How many micro-batches are in flight on a stage depends on how many stages follow, which is not known yet.
        for in_flight in sorted({min(number, task.micro_batches) for number in (1, 2, 4)}):
            candidates += (each for each in _flowing(task, in_flight) if fewest <= len(each[0]) <= most)
            if not np.isfinite(task.memory_bytes).any():
                break
    timed = sorted(zip(_times_s(task, candidates), candidates, strict=True))
    best_s, best = math.inf, None
    number, rounds = (
        (_POLISHED if task.num_machines <= _MOVED else 1, _ROUNDS) if thorough else (_QUICKLY_POLISHED, _QUICK_ROUNDS)
    )
    for _, candidate in list(dict.fromkeys(timed))[:number]:
        time_s, polished = _polished(task, candidate, fewest=fewest, most=most, rounds=rounds)
        if time_s < best_s:
            best_s, best = time_s, polished
    if best is None:
        return None
    machines, edges = best
    return tuple(
        PipelineStage(machine=machine, first=first, stop=stop)
        for machine, (first, stop) in zip(machines, pairwise(edges), strict=True)
    )


def _times_s(task: PipelineTask, candidates: Sequence[_Candidate]) -> list[float]:
    by_stages: dict[int, list[int]] = {}
    for index, (machines, _) in enumerate(candidates):
        by_stages.setdefault(len(machines), []).append(index)
    found = [math.inf] * len(candidates)
    for indices in by_stages.values():
        arrays = [np.array([candidates[index][part] for index in indices]) for part in (0, 1)]
        for index, time_s in zip(indices, task.times_s(*arrays).tolist(), strict=True):
            found[index] = time_s
    return found


def _extents(task: PipelineTask, tau_s: float, in_flight: int) -> NDArray[np.int64]:
    """For each machine and each first piece, where its stage must stop to be done within `tau_s` and to fit into memory."""
    pieces = task.num_pieces
    found = np.empty((task.num_machines, pieces + 1), dtype=np.int64)
    for machine in range(task.num_machines):
        before = task.work_before_s[machine]
        # The 1e-12: where tau is exactly what a stage takes, rounding in the sums must not cost it its last piece.
        by_time = np.searchsorted(before, before + (tau_s - task.step_s[machine]) * (1 + 1e-12), side="right") - 1
        kept = task.state_before_bytes + in_flight * task.activations_before_bytes
        by_memory = np.searchsorted(kept, kept + task.memory_bytes[machine], side="right") - 1
        by_update = (task.updating_bytes <= task.memory_bytes[machine]).sum(axis=1) - 1
        found[machine] = np.maximum(np.minimum.reduce([by_time, by_memory, by_update]), np.arange(pieces + 1))
    return found


def _cuttable(task: PipelineTask, tau_s: float) -> NDArray[np.int64]:
    """For each two machines and each piece, the last one up to there that may be cut at: within tau."""
    pieces, machines = task.num_pieces, task.num_machines
    room = (tau_s - task.latency_s) * task.bandwidth_bytes_per_s
    found = np.full((machines, machines, pieces + 1), pieces, dtype=np.int64)
    index = np.arange(pieces)
    for source in range(machines):
        for target in range(machines):
            # Example: cuts in front of pieces 0 to 3 send 8, 8, 2 and 9 bytes, and there is room for 4. The last piece up to
            # each of them that may be cut at is 0, 0, 2, 2, where 0 is no cut at all.
            thin = np.where(task.crossing_bytes <= room[source, target], index, 0)
            found[source, target, :pieces] = np.maximum.accumulate(thin)
    return found


def _reach(task: PipelineTask, tau_s: float, in_flight: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """How far each set of machines gets with each of its machines at the end, -1 where not; what preceded; where it was cut."""
    machines, pieces = task.num_machines, task.num_pieces
    stops, cuts = _extents(task, tau_s, in_flight), _cuttable(task, tau_s)
    reach = np.full((1 << machines, machines), -1, dtype=np.int64)
    previous = np.full((1 << machines, machines), -1, dtype=np.int64)
    begins = np.zeros((1 << machines, machines), dtype=np.int64)
    for machine in range(machines):
        reach[1 << machine, machine] = stops[machine, 0]
    sets = np.arange(1 << machines)
    sizes = np.array([bin(each).count("1") for each in range(1 << machines)])
    # Sets of one machine more each time, so that all that a set grows from is known. Example: 4 pieces, of which machine 0
    # takes 2 s for each and machine 1 takes 1 s, and tau = 3 s. Alone they get to piece 1 and to piece 3. Both together get to
    # 4, with either one at the end: 0 does the first piece and 1 the other three, or 1 the first three and 0 the last. Within 2
    # s they get to 3 of 4, so that tau must be larger.
    for size in range(1, machines):
        of_size = sets[sizes == size]
        for machine in range(machines):
            free = of_size[(of_size >> machine) & 1 == 0]
            grown = free | 1 << machine
            far = reach[free]  # (sets, machine at the end)
            for last in range(machines):
                if last == machine:
                    continue
                at = far[:, last]
                known = (at > 0) & (at < pieces)
                cut = np.where(known, cuts[last, machine, np.maximum(at, 0)], 0)
                known &= cut > 0
                stop = np.where(known, stops[machine, cut], -1)
                better = stop > np.maximum(reach[grown, machine], cut)
                reach[grown[better], machine] = stop[better]
                previous[grown[better], machine] = last
                begins[grown[better], machine] = cut[better]
    return reach, previous, begins


def _flowing(task: PipelineTask, in_flight: int) -> Iterator[_Candidate]:
    """Pipelines of small tau, found by bisection; every one that is found on the way is a candidate."""
    low_s, high_s = 0.0, float(task.work_s.sum(axis=1).max() + task.step_s.max())
    if math.isfinite(task.latency_s.max()):
        slowest = task.bandwidth_bytes_per_s[~np.eye(task.num_machines, dtype=bool)]
        high_s += float(task.latency_s.max()) + (float(task.crossing_bytes.max() / slowest.min()) if slowest.size else 0.0)
    for _ in range(_STEPS):
        tau_s = (low_s + high_s) / 2
        reach, previous, begins = _reach(task, tau_s, in_flight)
        done = np.argwhere(reach >= task.num_pieces)
        if not len(done):
            low_s = tau_s
            continue
        high_s = tau_s
        # Of the sets that get there, some of the smallest: every stage more takes time to fill.
        order = sorted(map(tuple, done.tolist()), key=lambda each: (each[0].bit_count(), each))
        for machines, last in order[:8]:
            yield _traced(task, machines, last, previous, begins)


def _traced(task: PipelineTask, machines: int, last: int, previous: NDArray[np.int64], begins: NDArray[np.int64]) -> _Candidate:
    order, edges = [last], [task.num_pieces]
    while (before := int(previous[machines, last])) >= 0:
        edges.insert(0, int(begins[machines, last]))
        order.insert(0, before)
        machines, last = machines & ~(1 << last), before
    return tuple(order), (0, *edges)


def _ordered(task: PipelineTask, *, fewest: int, most: int, thorough: bool) -> Iterator[_Candidate]:
    """Greedy filling of the fastest machines, and of the fastest of those with good links, for many numbers of them: in both
    directions of a chain of good links, and in the order of their memory, since early stages keep more micro-batches."""
    by_speed = np.argsort(task.work_s.sum(axis=1) + task.step_s, kind="stable")
    rates = np.median(task.bandwidth_bytes_per_s, axis=1)
    limits = sorted(set(np.quantile(rates, _QUANTILES).tolist())) if task.num_machines > 2 else [0.0]
    filling = _Filling(task)
    for limit in limits:
        fastest = by_speed[rates[by_speed] >= limit].tolist()
        count = fewest
        while count <= min(most, len(fastest)):
            chain = _chained(task, fastest[:count])
            orders = {tuple(chain): None, tuple(reversed(chain)): None}
            if np.isfinite(task.memory_bytes).any():
                orders[tuple(sorted(chain, key=lambda machine: -task.memory_bytes[machine]))] = None
            for order in orders:
                edges = filling.tightest(order)
                if edges is not None:
                    yield order, edges
            count = max(count + 1, count * 3 // 2 if count > (EXACT if thorough else 3) else 0)


def _chained(task: PipelineTask, machines: Sequence[int]) -> list[int]:
    """The machines in an order in which neighbours have fast links: the nearest one that is left, from the first on."""
    left, chain = list(machines[1:]), [machines[0]]
    while left:
        rates = task.bandwidth_bytes_per_s[chain[-1], left]
        chain.append(left.pop(int(np.argmax(rates))))
    return chain


class _Filling:
    """Greedy filling of machines in a given order, each of which gets one piece at least."""

    def __init__(self, task: PipelineTask) -> None:
        self._task = task
        self._work: dict[int, list[float]] = {}
        self._kept: dict[int, list[float]] = {}

    def tightest(self, order: Sequence[int]) -> tuple[int, ...] | None:
        """The edges of least tau, found by bisection; None where memory allows none."""
        task, pieces = self._task, self._task.num_pieces
        for machine in order:
            if machine not in self._work:
                self._work[machine] = task.work_before_s[machine].tolist()
        low_s, high_s = 0.0, max(self._work[machine][-1] + float(task.step_s[machine]) for machine in order)
        best = self._filled(order, high_s, pieces)
        for _ in range(_STEPS if best else 0):
            tau_s = (low_s + high_s) / 2
            edges = self._filled(order, tau_s, pieces)
            low_s, high_s, best = (tau_s, high_s, best) if edges is None else (low_s, tau_s, edges)
        return best

    def _filled(self, order: Sequence[int], tau_s: float, pieces: int) -> tuple[int, ...] | None:
        task, edges = self._task, [0]
        in_flight = task.in_flight(len(order)).tolist()
        for index, machine in enumerate(order):
            first, work, kept = edges[-1], self._work[machine], self._kept_bytes(in_flight[index])
            by_time = bisect_right(work, work[first] + (tau_s - float(task.step_s[machine])) * (1 + 1e-12))
            memory = float(task.memory_bytes[machine])
            by_memory = bisect_right(kept, kept[first] + memory)
            if memory < math.inf:
                by_memory = min(by_memory, bisect_right(task.updating_rows_bytes[first], memory))
            stop = min(by_time - 1, by_memory - 1, pieces - (len(order) - index - 1))
            if stop <= first:
                return None
            edges.append(stop)
        return tuple(edges) if edges[-1] == pieces else None

    def _kept_bytes(self, in_flight: int) -> list[float]:
        if in_flight not in self._kept:
            kept = self._task.state_before_bytes + in_flight * self._task.activations_before_bytes
            self._kept[in_flight] = kept.tolist()
        return self._kept[in_flight]


def _polished(task: PipelineTask, candidate: _Candidate, *, fewest: int, most: int, rounds: int) -> tuple[float, _Candidate]:
    """Move single cuts, exchange machines and leave out stages, as long as T becomes less."""
    (least_s,) = _times_s(task, [candidate])
    for _ in range(rounds):
        others = list(_neighbours(task, candidate, fewest=fewest, most=most))
        time_s, better = min(zip(_times_s(task, others), others, strict=True), default=(math.inf, candidate))
        if not time_s < least_s * (1 - 1e-12):
            break
        least_s, candidate = time_s, better
    return least_s, candidate


def _neighbours(task: PipelineTask, candidate: _Candidate, *, fewest: int, most: int) -> Iterator[_Candidate]:
    machines, edges = candidate
    stages = range(len(machines))
    work = [
        float(task.work_before_s[machines[at], edges[at + 1]] - task.work_before_s[machines[at], edges[at]]) for at in stages
    ]
    by_work = sorted(stages, key=work.__getitem__)
    longest, shortest = by_work[-_MOVED:], by_work[:_MOVED]
    idle = sorted(set(range(task.num_machines)).difference(machines))[:EXACT]
    for at in sorted({edge for stage in longest for edge in (stage, stage + 1)} - {0, len(machines)}):
        for edge in (edges[at] + step for step in (-4, -2, -1, 1, 2, 4)):
            if edges[at - 1] < edge < edges[at + 1]:
                yield machines, (*edges[:at], edge, *edges[at + 1 :])
    if len(machines) <= EXACT:  # two cuts at once, which memory may ask for, and a stage more
        for at in range(1, len(machines) - 1):
            for step in (-1, 1):
                moved = (edges[at] + step, edges[at + 1] + step)
                if edges[at - 1] < moved[0] and moved[1] < edges[at + 2]:
                    yield machines, (*edges[:at], *moved, *edges[at + 2 :])
        for stage, machine in product(longest if len(machines) < most else (), idle):
            first, stop = edges[stage : stage + 2]
            for place, edge in product((stage, stage + 1), sorted({first + 1, (first + stop) // 2, stop - 1})):
                if first < edge < stop:
                    yield (*machines[:place], machine, *machines[place:]), (*edges[: stage + 1], edge, *edges[stage + 1 :])
    if len(machines) > fewest:
        for stage in shortest:
            order = (*machines[:stage], *machines[stage + 1 :])
            for at in {stage, stage + 1} - {0, len(machines)} if len(machines) > 1 else ():
                yield order, (*edges[:at], *edges[at + 1 :])
    for index, stage in enumerate(longest):
        for machine in idle:
            yield (*machines[:stage], machine, *machines[stage + 1 :]), edges
        for other in longest[:index]:
            swapped = list(machines)
            swapped[stage], swapped[other] = swapped[other], swapped[stage]
            yield tuple(swapped), edges
