"""Errors of a network that memory does not hold, and what would make it fit, found by trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tatami.cluster import Cluster, Processor
from tatami.errors import MemoryLackError
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout
from tatami.tiling.left_out import least_bytes
from tatami.tiling.memory import lacking_bytes, memory_bytes
from tatami.tiling.planner import AbstractPlanner, layout_of
from tatami.tiling.room import with_room
from tatami.units import format_size
from tatami.workload import Workload

_SHOWN = 4
_MOST_TRIED = 256
"""Where there are more processors, what would help is not tried out."""
_MACHINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_PLAIN_SGD_BYTES = 12.0
"""Bytes of state for each trained weight with an optimizer without moments."""


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
    return MemoryLackError(f"{planner.name} finds no room for {what}: {', '.join(told)}{more}", lacking_bytes=lacking)


def with_remedies(
    error: MemoryLackError, planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost
) -> MemoryLackError:
    """The error, and what would do, which takes some plans more to find out."""
    what = "; ".join(_remedies(planner, cluster=cluster, workload=workload, cost=cost))
    what = what or "take fewer samples, or machines with more memory"
    return MemoryLackError(f"{error}. {what[0].upper()}{what[1:]}", lacking_bytes=error.lacking_bytes)


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes), digits=3)


def _remedies(planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Iterator[str]:
    """The remedies that would work, found by trying."""
    if cluster.size > _MOST_TRIED:
        return

    def fits(cluster: Cluster, workload: Workload) -> bool:
        layout = layout_of(planner, cluster=cluster, workload=workload, cost=cost)
        return with_room(layout, cluster=cluster, workload=workload, cost=cost) is not None

    if workload.micro_batches is not None and fits(cluster, replace(workload, micro_batches=None)):
        yield "it fits in more micro-batches: leave their number to the planner"
        return
    if workload.recompute is False and fits(cluster, replace(workload, recompute=None)):
        yield "it fits if activations are recomputed: leave that to the planner"
        return
    low, high = cluster.size - 1, workload.samples
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(cluster, workload.with_samples(middle)) else (low, middle)
    if low >= cluster.size:
        yield f"it would hold {low} samples"
    if workload.state_bytes_per_parameter > _PLAIN_SGD_BYTES and fits(
        cluster, replace(workload, state_bytes_per_parameter=_PLAIN_SGD_BYTES)
    ):
        yield "all samples would fit with an optimizer without moments, such as plain SGD"
    if workload.batch_statistics and fits(cluster, replace(workload, batch_statistics=())):
        yield 'all would fit in micro-batches with batch_norm="local" (each takes its own statistics, as in DDP: not exact)'
    for count in _MACHINES:
        grown = _grown(cluster, count=count)
        if grown.size <= workload.samples and fits(grown, workload):
            more = f"{count} more machine{'s' if count > 1 else ''} like {_largest(cluster).name}"
            yield f"all {workload.samples} samples would fit with {more}"
            return


def _largest(cluster: Cluster) -> Processor:
    return max(cluster.processors, key=lambda processor: processor.memory_bytes or 0)


def _grown(cluster: Cluster, *, count: int) -> Cluster:
    like = _largest(cluster)
    more = tuple(replace(like, name=f"{like.name} again {index}") for index in range(count))
    return replace(cluster, processors=(*cluster.processors, *more))
