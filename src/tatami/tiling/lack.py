"""Errors of a network that memory does not hold, and what would make it fit, found by trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tatami.cluster import Cluster, Processor
from tatami.errors import MemoryLackError
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout
from tatami.tiling.left_out import least_bytes
from tatami.tiling.memory import lacking_bytes, memory_bytes
from tatami.tiling.planner import AbstractPlanner, layout_of
from tatami.tiling.room import with_room
from tatami.tiling.weighted import data_parallel
from tatami.units import format_duration, format_size
from tatami.workload import Workload
from tatami.workload.workload import OWN_COPIES

_SHOWN = 4
_MOST_TRIED = 256
"""Where there are more processors, what would help is not tried out."""
_MACHINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MOST_ENLARGED = 4
"""The fastest machines for which it is tried what more memory would do."""
_MIB = 1 << 20
_SHARDED = "the optimizer's state shared out among the ranks, tatami.tile(sharded_optimizer=True)"


def lack_of_size(cluster: Cluster, *, workload: Workload) -> MemoryLackError:
    """No processor alone holds what all repeat."""
    least = least_bytes(workload)
    largest = _largest(cluster)
    return MemoryLackError(
        f"every processor keeps {_size(least)} of this network whatever it computes, and the largest, {largest.name}, has "
        f"{_size(largest.memory_bytes or 0)}",
        lacking_bytes={each.name: least - (each.memory_bytes or 0) for each in cluster.processors},
    )


def lack_of_room(
    planner: AbstractPlanner, layout: Layout, *, cluster: Cluster, workload: Workload, ranks: int | None
) -> MemoryLackError:
    """The processors do not hold the network as the planner lays it, in as many micro-batches as there may be."""
    number = min(workload.most_micro_batches, workload.samples) if workload.micro_batches is None else workload.micro_batches
    layout = layout.in_micro_batches(number)
    layout = layout.recomputing() if workload.may_recompute else layout
    kept = memory_bytes(layout, workload=workload, cluster=cluster, ranks=ranks)
    lacking = lacking_bytes(layout, cluster=cluster, workload=workload, ranks=ranks)
    told = [
        f"{name} lacks {_size(missing)} (it would keep {_size(kept[name])} in {_size(cluster.by_name[name].memory_bytes or 0)})"
        for name, missing in list(lacking.items())[:_SHOWN]
    ]
    more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
    what = f"{workload.samples} samples of this network"
    if number == workload.samples > 1:
        what = "this network, with one sample at a time"
    elif number > 1:
        what += f" in {number} micro-batches"
    what += ", recomputing all activations" if layout.recomputes else ""
    who = "there is" if planner.chooses_among else f"{planner.name} finds"
    return MemoryLackError(f"{who} no room for {what}: {', '.join(told)}{more}", lacking_bytes=lacking)


def with_remedies(
    error: MemoryLackError, planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost
) -> MemoryLackError:
    """The error, and what would do, which takes some plans more to find out."""
    what = "; ".join(_remedies(planner, cluster=cluster, workload=workload, cost=cost))
    fits_sharded = _SHARDED in what
    what = what or "take fewer samples, or machines with more memory"
    return MemoryLackError(
        f"{error}. {what[0].upper()}{what[1:]}", lacking_bytes=error.lacking_bytes, fits_sharded=fits_sharded
    )


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes), digits=3)


def _remedies(planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Iterator[str]:
    """The remedies that would work, found by trying."""
    if cluster.size > _MOST_TRIED:
        return

    def held(cluster: Cluster, workload: Workload) -> Layout | None:
        layout = layout_of(planner, cluster=cluster, workload=workload, cost=cost)
        return with_room(layout, cluster=cluster, workload=workload, cost=cost)

    def fits(cluster: Cluster, workload: Workload) -> bool:
        return held(cluster, workload) is not None

    if workload.micro_batches is not None and fits(cluster, replace(workload, micro_batches=None)):
        yield "it fits in more micro-batches: leave their number to the planner"
        return
    if workload.recompute is False and fits(cluster, replace(workload, recompute=None)):
        yield "it fits if activations are recomputed: leave that to the planner"
        return
    if not workload.sharded_bytes_per_parameter:
        yield from _with_shards(held, cluster=cluster, workload=workload.with_sharded_optimizer)
    low, high = cluster.size - 1, workload.samples
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(cluster, workload.with_samples(middle)) else (low, middle)
    if low >= cluster.size:
        yield f"it would hold {low} samples"
    without_copy = replace(
        workload,
        state_bytes_per_parameter=workload.state_bytes_per_parameter - workload.rescue_bytes_per_parameter,
        sharded_bytes_per_parameter=max(0.0, workload.sharded_bytes_per_parameter - workload.rescue_bytes_per_parameter),
        rescue_bytes_per_parameter=0.0,
    )
    if workload.rescue_bytes_per_parameter and fits(cluster, without_copy):
        yield "all samples would fit without the Trainer's copy of the last good weights (tatami.tile(rescue_copy=False))"
    plain_bytes = OWN_COPIES * workload.element_bytes + workload.rescue_bytes_per_parameter
    if workload.state_bytes_per_parameter > plain_bytes and fits(
        cluster, replace(workload, state_bytes_per_parameter=plain_bytes, update_bytes_per_parameter=0.0)
    ):
        yield "all samples would fit with an optimizer without moments, such as plain SGD (tatami.tile(optimizer_moments=0))"
    if workload.batch_statistics and fits(cluster, replace(workload, batch_statistics=())):
        yield 'all would fit in micro-batches with batch_norm="local" (each takes its own statistics, as in DDP: not exact)'
    bought = sorted(_bought(held, cluster=cluster, workload=workload, cost=cost))
    knows_times = cost.compares_machines(cluster)
    for predicted_s, what in bought:
        time = f" ({format_duration(predicted_s, digits=3)} an iteration)" if knows_times else ""
        yield f"all {workload.samples} samples would fit with {what}{time}"


def _with_shards(held: Callable[[Cluster, Workload], Layout | None], *, cluster: Cluster, workload: Workload) -> Iterator[str]:
    """What each processor would keep of a workload whose optimizer is sharded, where that makes room."""
    least = least_bytes(workload)
    able = [each.name for each in cluster.processors if each.memory_bytes is None or each.memory_bytes >= least]
    if len(able) < 2:
        return
    run = cluster.only(able)
    layout = held(run, workload)
    if layout is None or layout.empty(workload):
        return
    kept = memory_bytes(layout, workload=workload, cluster=run)
    given = {name: run.by_name[name].memory_bytes for name in able[:_SHOWN]}
    sizes = [f"{name} would keep {_size(kept[name])}" + (f" of {_size(size)}" if size else "") for name, size in given.items()]
    more = f" and {len(able) - _SHOWN} more" if len(able) > _SHOWN else ""
    yield f"all samples would fit with {_SHARDED}: {', '.join(sizes)}{more}"


def _bought(
    held: Callable[[Cluster, Workload], Layout | None], *, cluster: Cluster, workload: Workload, cost: AbstractCost
) -> Iterator[tuple[float, str]]:
    """What could be bought, with the predicted seconds of an iteration: more memory for one machine, or more machines."""

    def priced(larger: Cluster, what: str) -> Iterator[tuple[float, str]]:
        layout = held(larger, workload) if larger.size <= workload.samples else None
        if layout is not None:
            yield cost.price(layout, cluster=larger, workload=workload).total, what

    number = min(workload.most_micro_batches, workload.samples) if workload.micro_batches is None else workload.micro_batches
    fastest = sorted(cluster.processors, key=lambda each: -float(each.speed))[:_MOST_ENLARGED]
    enlarged = []
    for each in fastest:
        alone = cluster.only([each.name])
        layout = data_parallel(alone.processors).in_micro_batches(number)
        layout = layout.recomputing() if workload.may_recompute else layout
        needed = max(memory_bytes(layout, workload=workload).values())
        # Whole MiB, so that what is printed is enough.
        larger = replace(each, memory_bytes=max(each.memory_bytes or 0, math.ceil(needed / _MIB) * _MIB))
        what = f"{_size(larger.memory_bytes or 0)} of memory on {each.name} alone"
        enlarged += list(priced(replace(alone, processors=(larger,)), what))
    yield from sorted(enlarged)[:1]
    for count in _MACHINES:
        machines = f"{count} more machine{'s' if count > 1 else ''} like {_largest(cluster).name}"
        found = list(priced(_grown(cluster, count=count), machines))
        if found:
            yield from found
            return


def _largest(cluster: Cluster) -> Processor:
    return max(cluster.processors, key=lambda processor: processor.memory_bytes or 0)


def _grown(cluster: Cluster, *, count: int) -> Cluster:
    like = _largest(cluster)
    more = tuple(replace(like, name=f"{like.name} again {index}") for index in range(count))
    return replace(cluster, processors=(*cluster.processors, *more))
