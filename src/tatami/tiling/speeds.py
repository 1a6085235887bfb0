"""Other speeds for a cluster: given on the command line, or estimated while training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

from tatami.cluster import Cluster, SpeedTable, at_sizes, listed_speeds, speed_at
from tatami.cluster.link import LARGEST_LATENCY_S
from tatami.cluster.speed_table import speed_problem
from tatami.errors import PlanError
from tatami.tiling.layout import Layout
from tatami.workload import Workload

_BISECTIONS = 100


def with_speeds(cluster: Cluster, speeds: Mapping[str, float] | Sequence[float]) -> Cluster:
    """The same cluster at `speeds`: by processor name, or in the order of the ranks.

    Raises:
        PlanError: a speed that is missing, zero, negative or not finite; a name or a number of speeds that does not fit.
    """
    names = [processor.name for processor in cluster.processors]
    if isinstance(speeds, Mapping):
        missing = [name for name in names if name not in speeds]
        unknown = [name for name in speeds if name not in cluster.by_name]
        if missing or unknown:
            raise PlanError(
                f"speeds must name the processors of the cluster: missing {missing or 'none'}, unknown {unknown or 'none'}"
            )
        for name in names:
            if problem := speed_problem(speeds[name]):
                raise PlanError(f"the speed of {name} {problem}")
        listed = [speeds[name] for name in names]
    else:
        rule = "speeds must be a number > 0 for each processor, or such numbers by the processors' names"
        listed = list(listed_speeds(speeds, rule=rule, error=PlanError))
        if len(listed) != len(names):
            raise PlanError(
                f"{len(listed)} speeds for {len(names)} processors ({names[0]} to {names[-1]}): give one for each, in the "
                "order of the ranks"
            )
    pairs = zip(cluster.processors, listed, strict=True)
    kept = (replace(each, speed=speed if isinstance(speed, SpeedTable) else float(speed)) for each, speed in pairs)
    return replace(cluster, processors=tuple(kept))


def at_paces(cluster: Cluster, paces: Mapping[str, float]) -> Cluster:
    """The same machines, each so many times as fast at sending and receiving, and at calls, as when it was measured.

    Whatever slows down a machine's computing, another program or a hot chip, slows down its messages.

    Args:
        cluster: as measured; speeds stay as they are.
        paces: by processor, 1 for one that is as it was.
    """
    if not cluster.messages_known and not cluster.calls_known:
        return cluster
    processors = (
        replace(
            each,
            message_s=min(each.message_s / pace, LARGEST_LATENCY_S),
            copy_bytes_per_s=each.copy_bytes_per_s * pace,
            call_s=min(each.call_s / pace, LARGEST_LATENCY_S),
            step_s=min(each.step_s / pace, LARGEST_LATENCY_S),
        )
        for each, pace in ((each, paces[each.name]) for each in cluster.processors)
    )
    return replace(cluster, processors=tuple(processors))


def at_equal_times(cluster: Cluster, *, workload: Workload) -> Cluster:
    """The cluster at plain speeds: where some depend on the size of the tile, those at which all take the same time.

    The largest tiles that processors can do in a time T grow with T; at the least T in which they cover the workload, areas in
    proportion to these speeds take T each (Lastovetsky, Reddy: Data partitioning with a functional performance model, 2007).
    """
    if not cluster.sized:
        return cluster
    work = workload.flop(width=1.0, height=1.0)
    if not work:
        return with_speeds(cluster, [float(processor.speed) for processor in cluster.processors])
    low, high = 0.0, min(work / speed_at(processor.speed, work) for processor in cluster.processors)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if fsum(_size_in(processor.speed, middle) for processor in cluster.processors) >= work:
            high = middle
        else:
            low = middle
    return with_speeds(cluster, [_size_in(processor.speed, high) / high for processor in cluster.processors])


def _size_in(speed: float, time: float) -> float:
    return speed.size_in(time) if isinstance(speed, SpeedTable) else speed * time


def at_tiles(cluster: Cluster, layout: Layout, *, workload: Workload) -> Cluster:
    """The cluster at the plain speeds of the tiles that lie."""
    if not cluster.sized:
        return cluster
    return with_speeds(cluster, at_sizes(cluster.speeds, tile_flop(layout, workload=workload)))


def tile_flop(layout: Layout, *, workload: Workload, samples: Sequence[float] | None = None) -> dict[str, float]:
    """What every tile computes at a time, in one micro-batch, as planners price it.

    Args:
        layout: who has which tile.
        workload: what is computed.
        samples: how many each replica has; None: as the layout divides those of the workload.
    """
    if samples is None:
        samples = [width * workload.samples for width in layout.sample_shares(workload.samples)]
    found = {}
    for replica, own_samples in zip(layout.replicas, samples, strict=True):
        shares = [(section, replica.unit_shares(section.units)) for section in workload.sections]
        for place, name in enumerate(replica.processors):
            flop = fsum(section.flop(own[place] * section.units) for section, own in shares)
            found[name] = own_samples * flop / replica.micro_batches
    return found
