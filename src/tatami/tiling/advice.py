"""Whether a plan is worth it: a rule of thumb for two-dimensional tiles, and one machine alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from tatami.cluster import Cluster, fastest
from tatami.tiling.alphabeta import AlphaBetaCost
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.memory import in_fewest_micro_batches
from tatami.tiling.plan import DEFAULT_PLANNER, Plan, compare
from tatami.units import format_duration
from tatami.workload import Workload

CLEAR_RHO, CLEAR_Q = 32.0, 0.5
"""From both on tiles pay clearly."""
_MUCH = 1.05


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to expect of tiles, in two numbers.

    Attributes:
        rho: N (n + l) m / (l s): weights that travel over outputs that travel, times the processors. For any network, the
            elements of all units' gradients over those that replicas sum.
        q: the weights' exchange over the computing, both of weighted data parallelism.
    """

    rho: float
    q: float

    @property
    def gain(self) -> float:
        """About how many times faster than weighted data parallelism: (1 + q) / (1 + 2 q / sqrt(rho)), at least 1."""
        return max(1.0, (1 + self.q) / (1 + 2 * self.q / sqrt(self.rho))) if self.rho else 1.0

    def sentence(self, predicted: float, *, has_replicas: bool = True) -> str:
        """What to do.

        Args:
            predicted: how many times faster than weighted data parallelism the best plan is predicted to be.
            has_replicas: whether processors share replicas in it, so that its tiles have two dimensions.
        """
        if not self.rho:
            return "Nothing in this network splits over units: it is laid in replicas of one processor each."
        numbers = f"rho = {self.rho:.3g} (weights over outputs), q = {self.q:.2g} (exchange over computing)"
        if self.rho >= CLEAR_RHO and self.q >= CLEAR_Q:
            return f"Use two-dimensional tiles: {numbers} promise {self.gain:.1f} x the speed of weighted data parallelism."
        rule = f"by the rule of thumb tiles pay where rho is at least {CLEAR_RHO:g} and q at least {CLEAR_Q:g}"
        if predicted >= _MUCH:
            gain = f"are predicted to be {predicted:.2f} x as fast as weighted data parallelism"
            if not has_replicas:
                return f"Fewer machines, or other shares of the samples, {gain}; {rule}: {numbers}."
            return f"Tiles {gain}, although {rule}: {numbers}."
        return f"Weighted data parallelism does about as well; {rule}: {numbers}."


def advise(weighted: Plan) -> Advice:
    """The rule of thumb for what `weighted`, a plan of weighted data parallelism, lays out."""
    workload = weighted.workload
    sums = workload.tensor_parallel_elements
    weights = len(weighted.layout.processors) * workload.gradient_elements
    rho = weights / sums if sums else (inf if weights else 0.0)
    return Advice(rho=rho, q=weighted.predicted.gradients / weighted.predicted.compute if weighted.predicted.compute else 0.0)


_ACCURACY = 1.1
"""Predicted times that differ by less are the same: half of the measured ones are within 7 %."""
_SHORT_S = 0.005
"""Shorter iterations on one host: calls and messages of its ranks, about a millisecond, may decide what is fastest."""
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


def ignores_messages(cluster: Cluster, *, cost: AbstractCost | None = None) -> bool:
    """Whether there are several hosts, and a plan cannot compare computing with messages: speeds are relative numbers."""
    time_cost = cost if isinstance(cost, AlphaBetaCost) else AlphaBetaCost()
    return len(set(cluster.host_of.values())) > 1 and not time_cost.compares_machines(cluster)


def alone_warning(planned: Plan, *, cluster: Cluster, cost: AbstractCost | None = None) -> str | None:
    """What to do where one machine alone is predicted to be as fast, or may be; None where it is not.

    Relative speeds say nothing of how long computing takes in comparison with sending, which matters between hosts. On one host
    messages are not measured.
    """
    time_cost = cost if isinstance(cost, AlphaBetaCost) else AlphaBetaCost()
    number = len(planned.layout.processors)
    num_hosts = len(set(cluster.host_of.values()))
    is_one_host = num_hosts == 1
    if ignores_messages(cluster, cost=cost):
        return (
            f"speeds are relative numbers, so this plan cannot compare computing with messages between the {num_hosts} hosts: "
            "one machine alone, or another plan, may be many times as fast. Leave speeds out, and they are measured together "
            "with the links, in seconds; or give tatami.cluster.read_cluster(FILE) of a file that `tatami probe` wrote"
        )
    if cluster.size == 1 or not time_cost.compares_machines(cluster):
        return None
    if is_one_host and number > 1 and not cluster.calls_known and planned.predicted_s < _SHORT_S:
        return (
            f"the {number} ranks are predicted to compute for {format_duration(planned.predicted_s, digits=3)} an iteration. "
            "Messages between ranks of one host are not measured, and may take longer than that: try one rank alone, or give "
            "more samples an iteration"
        )
    alone = fastest_alone(cluster, workload=planned.workload, cost=cost)
    if alone is None or alone.predicted_s > _ACCURACY * planned.predicted_s:
        return None
    (name,) = alone.layout.processors
    plan = "it is the only one that this plan uses"
    if number > 1:
        plan = f"this plan of {number} ranks {format_duration(planned.predicted_s, digits=3)}, too little less to be sure of"
        if planned.predicted_s >= alone.predicted_s:
            plan = f"this plan of {number} ranks {format_duration(planned.predicted_s, digits=3)}"
    return (
        f"{name} alone is predicted to take {format_duration(alone.predicted_s, digits=3)} an iteration, and {plan}: train on "
        "that machine alone, or give more samples an iteration or a faster link (`tatami plan` says what would bring how much)"
    )
