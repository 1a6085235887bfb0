"""How fast every rank is at the network itself, by the number of samples: for few of them, calls take longer than products."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.clock import NO_PACE, Clock, Pace, SystemClock
from tatami.cluster import Cluster, SpeedTable
from tatami.cluster.cores import memory_here
from tatami.comm.base import AbstractCommunicator
from tatami.errors import warn
from tatami.gradients.passes import leads_to
from tatami.measure.speeds import LONG_REPEAT_S, NOISY, REPEAT_S, REPEATS, AbstractPass, BlockPass, Timer
from tatami.partition.tracing.restore_state import unchanged
from tatami.partition.tracing.sample import FEWEST, Sample
from tatami.tiling.compute import calls_s
from tatami.workload import Workload

BUDGET_S = 6.0
"""Time for all sizes, in which a third of a core gets to the second size of a GPT of 14 M parameters; the repeats on a machine
that something else uses as well are not counted."""
_ALONE_S = 2.0
"""The same for a single rank: its speed decides nothing, and says how long an iteration takes."""
_ITERATIONS, _LONGEST_S = 3, 30.0
"""So many iterations are added to it, as the first size lets them be expected, but no longer than that."""
_FEW = 16
"""Samples to begin with where no sample of the network says how many."""
_GROWTH = 4
_SATURATED = 1.1
"""So many times as many samples at a speed that grows by less than this: with more of them it would grow no further."""
_FEWEST_REPEATS = 2
_MEMORY_FRACTION = 0.25
"""Part of the memory of a rank that a pass that is timed may take."""
_LEAST_PRODUCTS = 0.1
"""Part of the time that is left to the products where what calls take is taken off."""


@dataclass(frozen=True, kw_only=True)
class SpeedCurve:
    """What a forward and a backward pass over so many samples take a rank.

    Attributes:
        times_s: (samples, seconds), in the order of the samples; more samples never take less.
        spread: of the timings of the most samples: (slowest - fastest) / median.
    """

    times_s: tuple[tuple[int, float], ...]
    spread: float

    def speed(self, *, sample_flop: float, calls_s: float = 0.0) -> float:
        """The speed in flop/s; a `SpeedTable` where it depends on the size.

        Args:
            sample_flop: what the workload counts for one sample of the network.
            calls_s: what the calls of an iteration take, if they are priced apart: taken off, as far as the curve shows it.
        """
        less_s = min(calls_s, self._start_s)
        points = [
            (count * sample_flop, count * sample_flop / max(time_s - less_s, _LEAST_PRODUCTS * time_s))
            for count, time_s in self.times_s
        ]
        speeds = [speed for _, speed in points]
        return SpeedTable(points) if max(speeds) > _SATURATED * min(speeds) else speeds[-1]

    @property
    def _start_s(self) -> float:
        """What a pass over no sample would take, by the line through the two smallest sizes."""
        if len(self.times_s) < 2:
            return 0.0
        (few, few_s), (more, more_s) = self.times_s[:2]
        return max(0.0, few_s - few * (more_s - few_s) / (more - few))


def with_curves(cluster: Cluster, curves: Sequence[SpeedCurve], *, workload: Workload) -> Cluster:
    """The cluster at the speeds of the curves, less what calls take where the cluster has them."""
    sample_flop = max(1.0, workload.flop(width=1.0, height=1.0) / workload.samples)
    processors = (
        replace(each, speed=curve.speed(sample_flop=sample_flop, calls_s=calls_s(each, blocks=len(workload.blocks))))
        for each, curve in zip(cluster.processors, curves, strict=True)
    )
    return replace(cluster, processors=tuple(processors))


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What a rank says of a size: why it cannot be computed, whether the next may be faster, and whether that fits."""

    failed: str
    grows: bool
    fits: bool


def measure_curves(
    passes_of: Callable[[int], Sequence[AbstractPass]],
    comm: AbstractCommunicator,
    *,
    first: int,
    share: int,
    whole: int | None = None,
    sample_bytes: float = 0.0,
    budget_s: float = BUDGET_S,
    device: torch.device,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> list[SpeedCurve]:
    """Every rank's times, on all ranks at once, as they will run. Collective.

    At each step there are four times as many samples, until the speed of no rank grows any more, or there are as many samples
    as a rank is to compute, or for some rank more of them would take too long or too much memory. A rank whose speed still
    grows then goes on, while others wait: a CPU up to its part of `whole` samples in proportion to these speeds, and a GPU up
    to all of them, for which it may take no longer than for a part.

    Args:
        passes_of: what is computed for so many samples; may raise for more than `first`.
        first: the fewest samples.
        share: how many samples a rank would have if all had as many.
        whole: samples of all ranks together; None: no rank is timed with more than `share`.
        sample_bytes: what is kept for each sample.
        budget_s: about how long it may take, beside the time of `_ITERATIONS` iterations; less on one rank.
        device: on which it is computed.
        clock, pace: see `tatami.clock`.
    """
    alone = comm.size == 1 and not comm.changes
    timer = Timer(device=device, repeat_s=REPEAT_S, clock=clock or SystemClock(), pace=pace)
    most = _memory_bytes(comm, device) * _MEMORY_FRACTION / max(sample_bytes, 1.0)
    comm.barrier()
    timer.warm_up(passes_of(first))
    end_s = timer.clock.now_s() + (min(budget_s, _ALONE_S) if alone else budget_s)
    found: list[tuple[int, float]] = []
    count, spread, failed = first, 0.0, ""
    while True:
        fewest = 0 if alone else _FEWEST_REPEATS
        if found:
            times_s, failed = _tried(timer, passes_of, count, end_s=end_s, fewest=fewest)
        else:
            times_s = _times_s(timer, passes_of(count), end_s=end_s, fewest=fewest)
        more, time_s = min(_GROWTH * count, share), statistics.median(times_s or [0.0])
        if not found and not alone:
            # Machines on which an iteration takes seconds would else be judged by a single sample.
            end_s += min(_ITERATIONS * time_s * share / count, _LONGEST_S)
        left_s = end_s - timer.clock.now_s()
        grows = _grows([*found, (count, time_s)])
        fits = more <= most and time_s * more / count * _FEWEST_REPEATS <= left_s
        steps = list(comm.allgather_object(_Step(failed=failed, grows=grows, fits=fits)))
        if any(step.failed for step in steps):
            why = next(step.failed for step in steps if step.failed)
            _warn(comm, f"speeds are those of {found[-1][0]} samples: the network does not run on {count} ({why})")
            break
        found.append((count, time_s))
        spread = _spread(times_s)
        if more <= count or not all(step.fits for step in steps) or not any(step.grows for step in steps):
            break
        count = more
    rates = comm.allgather_object(found[-1][0] / max(found[-1][1], 1e-9))
    part = 1.0 if device.type == "cuda" else rates[comm.rank] / math.fsum(rates)
    last, goes_on = max(share, math.ceil((whole or 0) * part)), not any(step.failed for step in steps)
    while True:
        count, time_s = found[-1]
        more = min(_GROWTH * count, last)
        goes_on = goes_on and count < more <= most and _grows(found)
        goes_on = goes_on and time_s * more / count * _FEWEST_REPEATS <= end_s - timer.clock.now_s()
        if not any(comm.allgather_object(goes_on)):
            break
        times_s, failed = [], ""
        if goes_on:
            times_s, failed = _tried(timer, passes_of, more, end_s=end_s, fewest=_FEWEST_REPEATS)
        if times_s:
            found.append((more, statistics.median(times_s)))
            spread = _spread(times_s)
        goes_on = goes_on and not failed
        if why := next(filter(None, comm.allgather_object(failed)), ""):
            _warn(comm, f"a rank was not timed with more samples than its share ({why})")
    if any(comm.allgather_object(spread > NOISY and time_s < LONG_REPEAT_S)):
        # A quota may let short passes run at full speed and stop what takes longer: long ones tell what the share is.
        longer, passes = timer.longer(LONG_REPEAT_S), passes_of(count)
        times_s = [longer.seconds(passes) for _ in range(REPEATS + 1)][1:]
        spread, factor = _spread(times_s), statistics.median(times_s) / time_s
        found = [(samples, seconds * factor) for samples, seconds in found]
    times: list[tuple[int, float]] = []
    for samples, seconds in found:
        times.append((samples, max([seconds, *(before for _, before in times)])))
    return list(comm.allgather_object(SpeedCurve(times_s=tuple(times), spread=spread)))


def _grows(found: Sequence[tuple[int, float]]) -> bool:
    """Whether the speed at the last size (samples, seconds) is above that at the one before, as far as one is known."""
    if len(found) < 2:
        return True
    (few, few_s), (many, many_s) = found[-2:]
    return many_s * few * _SATURATED < few_s * many


def _tried(
    timer: Timer, passes_of: Callable[[int], Sequence[AbstractPass]], count: int, *, end_s: float, fewest: int
) -> tuple[list[float], str]:
    """Timings, or why there are none: the network is the user's, and may not run on more samples than it was tried with."""
    try:
        return _times_s(timer, passes_of(count), end_s=end_s, fewest=fewest), ""
    except Exception as error:
        return [], str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _times_s(timer: Timer, passes: Sequence[AbstractPass], *, end_s: float, fewest: int) -> list[float]:
    """Timings after one that warms up: fewer where they take long; that one where there is time for no other."""
    first_s = timer.seconds(passes)
    left_s = end_s - timer.clock.now_s()
    repeats = int(left_s / 2 / max(first_s, timer.repeat_s)) if first_s > 0 else REPEATS
    return [timer.seconds(passes) for _ in range(min(REPEATS, max(fewest, repeats)))] or [first_s]


def _spread(times_s: Sequence[float]) -> float:
    return (max(times_s) - min(times_s)) / statistics.median(times_s)


def _memory_bytes(comm: AbstractCommunicator, device: torch.device) -> float:
    """What there is for a rank."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free)
    return memory_here() / comm.local_size


def _warn(comm: AbstractCommunicator, text: str) -> None:
    if comm.rank == 0:
        warn(f"{text}, so speeds at the share of a rank are not known, and plans may be off")


def measure_network_curves(
    model: nn.Module,
    sample: Sample,
    comm: AbstractCommunicator,
    *,
    batch_size: int,
    sample_bytes: float = 0.0,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> list[SpeedCurve]:
    """Every rank's times for the network itself, from one sample up to an equal share of the batch. Collective.

    Gradients are added to those of the pass before, as those of micro-batches are.

    Args:
        model: the whole network, on the device that is to be timed; running statistics and random state are put back.
        sample: its inputs, there as well; they are repeated along their first axis.
        batch_size: of all ranks together.
        sample_bytes: what a pass keeps for each sample.
        clock, pace: see `tatami.clock`.
    """
    share, device = max(FEWEST, -(-batch_size // comm.size)), next(model.parameters()).device
    passes_of = network_passes(model, sample)
    with unchanged(model):
        takes_one = all(comm.allgather_object(_runs(passes_of, 1)))  # batch normalization may not
        return measure_curves(
            passes_of,
            comm,
            first=1 if takes_one else min(sample.samples, share),
            share=share,
            whole=batch_size,
            sample_bytes=sample_bytes,
            device=device,
            clock=clock,
            pace=pace,
        )


def network_passes(model: nn.Module, sample: Sample) -> Callable[[int], Sequence[AbstractPass]]:
    """Forward and backward through a network as the user wrote it, by the number of samples; the sample is repeated."""
    return lambda count: [_NetworkPass(model, sample.of_size(count))]


def measure_block_curves(
    workload: Workload,
    comm: AbstractCommunicator,
    *,
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> list[SpeedCurve]:
    """As `measure_network_curves`, for the blocks of `workload` alone, each as two linear layers. Collective."""
    share = max(1, -(-workload.samples // comm.size))

    def passes_of(count: int) -> Sequence[AbstractPass]:
        return [BlockPass(block, samples=count, dtype=dtype, device=device) for block in workload.blocks]

    return measure_curves(
        passes_of, comm, first=min(_FEW, share), share=share, whole=workload.samples, device=device, clock=clock, pace=pace
    )


def _runs(passes_of: Callable[[int], Sequence[AbstractPass]], count: int) -> bool:
    try:
        for each in passes_of(count):
            each.run()
    except Exception:  # the network is the user's
        return False
    return True


class _NetworkPass(AbstractPass):
    def __init__(self, model: nn.Module, sample: Sample) -> None:
        self._model = model
        self._sample = sample
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._grads: list[torch.Tensor | None] = [None] * len(self._weights)
        self._is_reentrant: bool | None = None

    def run(self) -> None:
        with torch.enable_grad():
            result = self._model(*self._sample.args, **self._sample.kwargs)
            leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if leaves and self._weights:
                total = torch.stack([leaf.double().sum() for leaf in leaves]).sum()
                if self._is_reentrant is None:
                    self._is_reentrant = leads_to([total.grad_fn], lambda node: node.name() == "CheckpointFunctionBackward")
                if self._is_reentrant:  # such checkpoints forbid torch.autograd.grad
                    self._accumulate(total)
                    return
                grads = torch.autograd.grad(total, self._weights, allow_unused=True)
                with torch.no_grad():
                    self._grads = [
                        new if old is None or new is None else old.add_(new)
                        for old, new in zip(self._grads, grads, strict=True)
                    ]

    def _accumulate(self, total: torch.Tensor) -> None:
        """Add to the gradients by `backward`; the network's own gradients, and hooks of them, are put back."""
        weights: list[Any] = list(self._weights)
        before = [(weight.grad, weight._post_accumulate_grad_hooks) for weight in weights]
        for weight, grad in zip(weights, self._grads, strict=True):
            weight.grad, weight._post_accumulate_grad_hooks = grad, {}
        try:
            total.backward()  # type: ignore[no-untyped-call]
            self._grads = [weight.grad for weight in weights]
        finally:
            for weight, (grad, hooks) in zip(weights, before, strict=True):
                weight.grad, weight._post_accumulate_grad_hooks = grad, hooks
