"""One machine alone: whether a plan of several is worth it."""

from __future__ import annotations

from tatami.cluster import Cluster, fastest
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.memory import in_fewest_micro_batches
from tatami.tiling.plan import DEFAULT_PLANNER, Plan, compare
from tatami.units import format_duration
from tatami.workload import Workload

_ACCURACY = 1.1
"""Predicted times that differ by less are the same: half of the measured ones are within 7 %."""
_MOST_HELD, _MOST_TRIED = 4, 32
"""Machines of different speed or memory that are planned alone, the fastest first: those that hold the network, and all."""


def fastest_alone(cluster: Cluster, *, workload: Workload, cost: AbstractCost | None = None) -> Plan | None:
    """The plan of the processor that is fastest without the others; None where none of the fastest holds the network."""
    found: list[Plan] = []
    tried: set[tuple[float, int | None]] = set()
    for processor in sorted(cluster.processors, key=lambda each: -fastest(each.speed)):
        kind = (fastest(processor.speed), processor.memory_bytes)
        if kind in tried:
            continue
        tried.add(kind)
        only = cluster.only([processor.name])
        whole = Layout(replicas=(Replica(width=1.0, processors=(processor.name,), heights=(1.0,)),))
        if in_fewest_micro_batches(whole, cluster=only, workload=workload) is not None:
            found += compare([DEFAULT_PLANNER], cluster=only, workload=workload, cost=cost)
        if len(found) == _MOST_HELD or len(tried) == _MOST_TRIED:
            break
    return min(found, key=lambda plan: plan.predicted_s, default=None)


def alone_warning(planned: Plan, *, cluster: Cluster, cost: AbstractCost | None = None) -> str | None:
    """What to do where one machine alone is predicted to be as fast; None where it is not, or where that is a guess.

    Relative speeds say nothing of how long computing takes in comparison with sending.
    """
    time_cost = cost if isinstance(cost, AlphaBetaCost) else AlphaBetaCost()
    if cluster.size == 1 or not time_cost.compares_machines(cluster):
        return None
    alone = fastest_alone(cluster, workload=planned.workload, cost=cost)
    if alone is None or alone.predicted_s > _ACCURACY * planned.predicted_s:
        return None
    (name,) = alone.layout.processors
    plan = "it is the only one that this plan uses"
    if (number := len(planned.layout.processors)) > 1:
        plan = f"this plan of {number} ranks {format_duration(planned.predicted_s, digits=3)}, too little less to be sure of"
        if planned.predicted_s >= alone.predicted_s:
            plan = f"this plan of {number} ranks {format_duration(planned.predicted_s, digits=3)}"
    return (
        f"{name} alone is predicted to take {format_duration(alone.predicted_s, digits=3)} an iteration, and {plan}: train on "
        "that machine alone, or give more samples an iteration or a faster link (`tatami plan` says what would bring how much)"
    )
