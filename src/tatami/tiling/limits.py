"""What keeps a plan from the ideal: its price again with one obstacle after the other taken away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import fsum

from tatami.cluster import Cluster, Link, OwnLink, Processor, fastest
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.plan import Plan
from tatami.tiling.speeds import at_tiles
from tatami.units import LARGEST_BANDWIDTH_BYTES_PER_S


class Obstacle(Enum):
    """What takes time that computing at full speed on every machine would not take."""

    BANDWIDTH = "bandwidth"
    LATENCY = "latency"
    MESSAGES = "messages"
    CALLS = "calls"
    SCATTER = "scatter"
    RECOMPUTATION = "recomputation"
    SHARES = "shares"
    UNUSED = "unused"


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """Where the time of an iteration goes.

    Attributes:
        ideal_s: all processors of the cluster compute all the time, and send nothing.
        lost_s: what each obstacle adds to that; together they are the predicted time. One may be slightly negative: what is
            priced without the others is planned with them.
    """

    ideal_s: float
    lost_s: dict[Obstacle, float]


def limits(plan: Plan, *, cluster: Cluster, cost: AlphaBetaCost | None = None) -> PlanLimits:
    """The obstacles of a plan, as `cost` prices them (`AlphaBetaCost()` where None)."""
    cost = AlphaBetaCost() if cost is None else cost
    layout, workload = plan.layout, plan.workload
    scale = cost.scale(cluster)
    own = at_tiles(cluster, layout, workload=workload).speeds
    placed = set(layout.processors)
    speeds = {each.name: own[each.name] if each.name in placed else fastest(each.speed) for each in cluster.processors}
    work_flop = workload.flop(width=1.0, height=1.0)
    ideal_s = work_flop / (fsum(speeds.values()) * scale)
    used_s = work_flop / (fsum(speeds[name] for name in layout.processors) * scale)
    lost_s: dict[Obstacle, float] = {}
    cluster = cluster.only(layout.processors)
    before_s = cost.price(layout, cluster=cluster, workload=workload).total
    for obstacle, without in _REMOVALS:
        cluster = without(cluster)
        after_s = replace(cost, flop_per_s=scale).price(layout, cluster=cluster, workload=workload).total
        lost_s[obstacle] = before_s - after_s
        before_s = after_s
    if layout.recomputes:
        after_s = replace(cost, flop_per_s=scale).price(layout.keeping, cluster=cluster, workload=workload).total
        lost_s[Obstacle.RECOMPUTATION] = before_s - after_s
        before_s = after_s
    lost_s[Obstacle.SHARES] = before_s - used_s
    lost_s[Obstacle.UNUSED] = used_s - ideal_s
    return PlanLimits(ideal_s=ideal_s, lost_s=lost_s)


def _with_links(change: Callable[[Link], Link]) -> Callable[[Cluster], Cluster]:
    def changed(cluster: Cluster) -> Cluster:
        processors = cluster.processors
        if cluster.own_links:
            processors = tuple(
                replace(each, link=OwnLink.of(change(cluster.link_of(each.host)))) if each.link else each for each in processors
            )
        return replace(
            cluster,
            processors=processors,
            local=change(cluster.local),
            network=change(cluster.network),
            links={pair: change(link) for pair, link in cluster.links.items()},
        )

    return changed


def _changed(change: Callable[[Processor], Processor]) -> Callable[[Cluster], Cluster]:
    return lambda cluster: replace(cluster, processors=tuple(map(change, cluster.processors)))


_REMOVALS: tuple[tuple[Obstacle, Callable[[Cluster], Cluster]], ...] = (
    (Obstacle.BANDWIDTH, _with_links(lambda link: replace(link, bandwidth_bytes_per_s=LARGEST_BANDWIDTH_BYTES_PER_S))),
    (Obstacle.LATENCY, _with_links(lambda link: replace(link, latency_s=0.0))),
    (Obstacle.MESSAGES, _changed(lambda each: replace(each, message_s=0.0, copy_bytes_per_s=math.inf))),
    (Obstacle.CALLS, _changed(lambda each: replace(each, call_s=0.0, step_s=0.0))),
    (Obstacle.SCATTER, _changed(lambda each: replace(each, spread=None))),
)
