"""A planner's layout made to fit: every processor in it has work, and no more to keep in memory than there is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tatami.cluster import Cluster, Processor
from tatami.errors import MemoryLackError, PlanError
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout
from tatami.tiling.memory import lacking_bytes, memory_bytes, squeezed
from tatami.tiling.planner import AbstractPlanner
from tatami.tiling.speeds import at_equal_times
from tatami.tiling.weighted import data_parallel
from tatami.units import format_size
from tatami.workload import Workload

_WORTH_LEAVING = 0.02
"""Of an iteration. Predictions are not finer."""
_ALL_TRIED = 32
_SHOWN = 4
_MOST_TRIED = 256
"""Where there are more processors, what would help is not tried out."""
_MACHINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A layout, and who is left out of it.

    Attributes:
        layout: of all others.
        slow: too slow for one sample and one unit, the first to go first.
        small: without memory for what all repeat.
        dear: with them an iteration is predicted to take longer, for their messages cost more time than they save; the first to
            go first.
    """

    layout: Layout
    slow: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    dear: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.small, *self.slow, *self.dear)


def fit(planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Fitted:
    """What the planner says, where every processor has work, and memory for it.

    Raises:
        MemoryLackError, PlanError: as `_held`.
    """
    found, lack = None, None
    try:
        found = _held(planner, cluster=cluster, workload=workload, cost=cost)
    except MemoryLackError as error:
        lack = error
    # Shares in proportion to speed may have nothing for the slowest, where equal ones would have all others wait for them, or
    # no room beside them.
    tried = set()
    for other in _leaving_slow(planner.chooses_among, cluster=cluster, workload=workload, cost=cost):
        found = other if found is None else _cheaper(found, other, cluster=cluster, workload=workload, cost=cost)
        if frozenset(other.slow) not in tried:
            found = _better_without(other.slow, found, planner, cluster=cluster, workload=workload, cost=cost)
        tried.add(frozenset(other.slow))
    if found is None:
        assert lack is not None
        raise lack
    if not planner.chooses_among:
        return found
    rest = _without(cluster, {*found.slow, *found.small})
    dear = _dear(rest, workload=workload, cost=cost) if cluster.messages_known else ()
    if not dear:
        return found
    gone = frozenset({*dear, *found.slow})
    without = _better_without(gone, found, planner, cluster=cluster, workload=workload, cost=cost, least=_WORTH_LEAVING)
    if without is found:
        return found
    return replace(without, slow=tuple(name for name in without.slow if name not in dear), dear=dear)


def _better_without(
    gone: Collection[str],
    found: Fitted,
    planner: AbstractPlanner,
    *,
    cluster: Cluster,
    workload: Workload,
    cost: AbstractCost,
    least: float = 0.0,
) -> Fitted:
    """What the planner says without some processors, as too slow, where that is faster by `least`; otherwise `found`."""
    try:
        without = _held(planner, cluster=_without(cluster, gone), workload=workload, cost=cost, ranks=cluster.size)
    except MemoryLackError:
        return found
    # In the order in which they would go.
    order = sorted((each for each in cluster.processors if each.name in gone), key=lambda each: each.speed)
    without = replace(without, slow=(*(each.name for each in order), *without.slow))
    return _cheaper(found, without, cluster=cluster, workload=workload, cost=cost, least=least)


def _cheaper(
    found: Fitted, other: Fitted, *, cluster: Cluster, workload: Workload, cost: AbstractCost, least: float = 0.0
) -> Fitted:
    """`other`, where it is cheaper by this part of the cost of `found`."""
    own, others = (cost.price(each.layout, cluster=cluster, workload=workload).total for each in (found, other))
    return other if others < (1 - least) * own else found


def _without(cluster: Cluster, gone: Collection[str]) -> Cluster:
    """The rest; the same object where none is gone, of which prices are remembered."""
    rest = tuple(each for each in cluster.processors if each.name not in gone)
    return cluster if len(rest) == cluster.size else replace(cluster, processors=rest)


def _leaving_slow(
    planners: Sequence[AbstractPlanner], *, cluster: Cluster, workload: Workload, cost: AbstractCost
) -> Iterator[Fitted]:
    """What planners say that leave out processors which would have no sample, or no unit."""
    for planner in planners if cluster.size <= _MOST_TRIED else planners[:1]:
        if planner.sized or not cluster.sized:
            with suppress(MemoryLackError):
                fitted = _held(planner, cluster=cluster, workload=workload, cost=cost)
                if fitted.slow:
                    yield fitted


def _dear(cluster: Cluster, *, workload: Workload, cost: AbstractCost) -> tuple[str, ...]:
    """Who might better be left out: so many of those whose messages take longest that the rest, a column each, is fastest.

    One at a time would not do: of three slow machines any two keep all others waiting.
    """
    order = sorted(cluster.processors, key=lambda each: (-each.message_s, each.copy_bytes_per_s))
    dearest = [each.name for each in order]
    counts = (
        range(cluster.size)
        if cluster.size <= _ALL_TRIED
        else [0, *(2**power for power in range(cluster.size.bit_length() - 1))]
    )
    prices = {}
    for count in counts:
        gone = set(dearest[:count])
        rest = replace(cluster, processors=tuple(each for each in cluster.processors if each.name not in gone))
        layout = data_parallel(at_equal_times(rest, workload=workload).processors)
        price = cost.price(layout, cluster=cluster, workload=workload)
        if price.unit != "s":
            return ()
        prices[count] = price.total
    best = min(prices, key=lambda count: prices[count])
    return tuple(dearest[:best]) if prices[best] < (1 - _WORTH_LEAVING) * prices[0] else ()


def _held(
    planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost, ranks: int | None = None
) -> Fitted:
    """The planner's layout of all processors that have work and memory.

    Args:
        ranks: of the run; those that have no tile are among them.

    Raises:
        MemoryLackError: the processors' memory does not hold the network, in any way that the planner knows.
        PlanError: the planner forgot a processor.
    """
    least_bytes = _least_bytes(workload)
    small = tuple(
        processor.name
        for processor in cluster.processors
        if processor.memory_bytes is not None and processor.memory_bytes < least_bytes
    )
    rest = tuple(processor for processor in cluster.processors if processor.name not in small)
    if not rest:
        raise MemoryLackError(
            f"every processor keeps {_size(least_bytes)} of this network whatever it computes, and the largest, "
            f"{_largest(cluster).name}, has {_size(_largest(cluster).memory_bytes or 0)}",
            lacking_bytes={processor.name: least_bytes - (processor.memory_bytes or 0) for processor in cluster.processors},
        )
    ranks = ranks or cluster.size
    if small:
        cluster = replace(cluster, processors=rest)  # otherwise the same object, of which prices are remembered
    slow: list[str] = []
    while True:
        layout = planner.layout(cluster=cluster, workload=workload, cost=cost)
        if set(layout.processors) != set(cluster.by_name):
            differ = sorted(set(layout.processors) ^ set(cluster.by_name))
            raise PlanError(
                f"planner {planner.name!r} must lay out every processor of the cluster once; these differ: {differ}"
            )
        if lacking_bytes(layout, cluster=cluster, workload=workload, ranks=ranks):
            found = squeezed(layout, cluster=cluster, workload=workload, ranks=ranks)
            if found is None:
                raise _lack(planner, layout, cluster, workload, ranks)
            layout = found
        empty = layout.empty(workload)
        if not empty:
            return Fitted(layout=layout, slow=tuple(slow), small=small)
        candidates = sorted(
            (processor for processor in cluster.processors if processor.name in empty), key=lambda processor: processor.speed
        )
        # Half of them at a time: ten thousand processors must not be planned ten thousand times.
        gone = {processor.name for processor in candidates[: (len(candidates) + 1) // 2]}
        slow += [processor.name for processor in candidates if processor.name in gone]
        rest = tuple(processor for processor in cluster.processors if processor.name not in gone)
        assert rest, "who lies alone gets everything"
        cluster = replace(cluster, processors=rest)


def _least_bytes(workload: Workload) -> float:
    """What a processor keeps that has one sample and one unit of the smallest block."""
    units = [
        workload.unit_state_bytes(block) + block.unit_activation_bytes + block.sample_activation_bytes
        for block in workload.blocks
    ]
    return workload.replicated_state_bytes + workload.replicated_activation_bytes + min(units, default=0.0)


def _lack(planner: AbstractPlanner, layout: Layout, cluster: Cluster, workload: Workload, ranks: int) -> MemoryLackError:
    kept = memory_bytes(layout, workload=workload, cluster=cluster, ranks=ranks)
    lacking = lacking_bytes(layout, cluster=cluster, workload=workload, ranks=ranks)
    told = [
        f"{name} lacks {_size(missing)} (it would keep {_size(kept[name])} in {_size(cluster.by_name[name].memory_bytes or 0)})"
        for name, missing in list(lacking.items())[:_SHOWN]
    ]
    more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
    return MemoryLackError(
        f"{planner.name} finds no room for {workload.samples} samples of this network: {', '.join(told)}{more}",
        lacking_bytes=lacking,
    )


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
    samples = _most_samples(planner, cluster=cluster, workload=workload, cost=cost)
    if samples:
        yield f"It would hold {samples} samples"
    for count in _MACHINES:
        grown = _grown(cluster, count=count)
        if grown.size <= workload.samples and _fits(planner, cluster=grown, workload=workload, cost=cost):
            largest = _largest(cluster)
            yield f"all {workload.samples} would fit with {count} more machine{'s' if count > 1 else ''} like {largest.name}"
            return


def _most_samples(planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> int:
    low, high = cluster.size - 1, workload.samples
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(planner, cluster=cluster, workload=workload.with_samples(middle), cost=cost):
            low = middle
        else:
            high = middle
    return low if low >= cluster.size else 0


def _fits(planner: AbstractPlanner, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> bool:
    layout = planner.layout(cluster=cluster, workload=workload, cost=cost)
    lacking = lacking_bytes(layout, cluster=cluster, workload=workload)
    return not lacking or squeezed(layout, cluster=cluster, workload=workload) is not None


def _largest(cluster: Cluster) -> Processor:
    return max(cluster.processors, key=lambda processor: processor.memory_bytes or 0)


def _grown(cluster: Cluster, *, count: int) -> Cluster:
    like = _largest(cluster)
    more = tuple(replace(like, name=f"{like.name} again {index}") for index in range(count))
    return replace(cluster, processors=(*cluster.processors, *more))


def leaving_out(planner: str, fitted: Fitted, *, cluster: Cluster, workload: Workload) -> Iterator[str]:
    """The warnings about processors that are left out."""
    if fitted.dear:
        yield (
            f"{planner} leaves out {', '.join(fitted.dear)}: an iteration is predicted to be shorter without, for messages "
            "would take there longer than its work saves. The planner srpm takes all"
        )
    if slow := fitted.slow:
        given = any(cluster.by_name[name].memory_bytes is not None for name in slow)
        why = "too slow, or with too little memory," if given else "too slow"
        yield (
            f"{planner} leaves out {', '.join(slow)}: {why} for one of {workload.samples} samples and one of "
            f"{workload.units} units beside the others. Plan without them, or give more samples"
        )
    if small := fitted.small:
        yield (
            f"{planner} leaves out {', '.join(small)}: not enough memory for what every processor repeats, "
            f"{_size(_least_bytes(workload))}. Plan without them, or give them more"
        )
