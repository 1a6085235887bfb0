"""What can be done about speeds that changed, from little to much, and what it costs: each iteration, and once to get there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tatami.cluster import Cluster, at_sizes
from tatami.retiling.decision import DecisionKind
from tatami.retiling.replica_cuts import forecast, works_of
from tatami.retiling.situation import Situation
from tatami.retiling.takes import moves
from tatami.tiling import AlphaBetaCost, Layout, with_speeds
from tatami.tiling.memory import lacking_bytes
from tatami.tiling.speeds import at_paces
from tatami.tiling.timed import balanced
from tatami.workload import Workload

LEAVE_BELOW = 0.25
"""A processor that has lost more than three quarters of its speed may be more trouble than help, and is tried without."""

UNSURE = 5.0
"""So many times what exchanges inside of replicas are predicted to take more must still pay: ranks of a replica, which wait for
each other often in an iteration, are slower than any measure of messages says, the more so the less of a core they have."""

_MOST_BEHIND = 4
_MOST_SWAPPED = 64
"""Most processors for which swaps are tried: with more they would take longer than they save."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One thing to do.

    Attributes:
        kind: how much of the layout changes.
        layout: the one to move to.
        iteration_s: predicted time of an iteration under it.
        price_s: predicted time of moving there.
    """

    kind: DecisionKind
    layout: Layout
    iteration_s: float
    price_s: float


def levels(situation: Situation, speeds: Mapping[str, float], *, fixed_s: float) -> tuple[float, tuple[Level, ...]]:
    """The time of an iteration as the tiles lie, and what would be faster, cheapest first.

    Args:
        situation: the layout in force.
        speeds: `tile_work` per second of every processor; may depend on the size of the tiles.
        fixed_s: what each re-tiling costs beside its rows.
    """
    now = situation.layout
    works = works_of(now, workload=situation.workload)
    here = at_sizes(speeds, works)
    found: dict[Layout, DecisionKind] = {}
    recut = situation.replicas(here)
    found.setdefault(recut, DecisionKind.REPLICAS)
    for layout, kind in ((now, DecisionKind.SAMPLES), (recut, DecisionKind.WHOLE)):
        shifted = shift_samples(layout, speeds=here, workload=situation.workload)
        if not lacking_bytes(shifted, cluster=situation.cluster, workload=situation.workload):
            found.setdefault(shifted, kind)
    whole = situation.whole(here)
    found.setdefault(whole, DecisionKind.WHOLE)
    there = at_sizes(speeds, works_of(whole, workload=situation.workload))
    if there != here:
        found.setdefault(situation.whole(there), DecisionKind.WHOLE)
    if situation.cluster.sized:
        # Only with tables that were given: of what a few tiles have shown, planners would try one size after the other.
        found.setdefault(situation.whole(speeds), DecisionKind.WHOLE)
    paces = situation.paces(speeds)
    slow = min(now.processors, key=lambda name: paces[name])
    # What is known of messages says by itself who should be left out.
    if len(now.processors) > 1 and paces[slow] < LEAVE_BELOW and not situation.cluster.messages_known:
        found.setdefault(situation.without(slow, speeds), DecisionKind.LEAVE)
    for name in _behind(situation):
        found.setdefault(situation.without(name, speeds), DecisionKind.LEAVE)
    if situation.slow_hosts:
        found.setdefault(_swapped(situation, here), DecisionKind.WHOLE)
    stays = _predicted(now, situation=situation, speeds=speeds)
    listed = []
    for layout, planned in found.items():
        kind = planned if set(layout.processors) >= set(now.processors) else DecisionKind.LEAVE
        takes = _predicted(layout, situation=situation, speeds=speeds)
        if layout != now and takes.is_faster_than(stays):
            price_s = fixed_s + rows_s(now, layout, cluster=situation.cluster, workload=situation.workload)
            listed.append((takes, Level(kind=kind, layout=layout, iteration_s=takes.iteration_s, price_s=price_s)))
    # What costs more to get to, and is not faster, is no choice.
    listed.sort(key=lambda each: (each[1].price_s, each[0].tensor_parallel_s, each[0].iteration_s))
    kept: list[tuple[_Predicted, Level]] = []
    for takes, level in listed:
        if not kept or takes.is_faster_than(kept[-1][0]):
            kept.append((takes, level))
    return stays.iteration_s, tuple(level for _, level in kept)


def iteration_s(layout: Layout, *, situation: Situation, speeds: Mapping[str, float]) -> float:
    """Predicted seconds of an iteration: compute by whole samples and units, and what the cost model says of the messages."""
    return _predicted(layout, situation=situation, speeds=speeds).iteration_s


@dataclass(frozen=True, kw_only=True)
class _Predicted:
    """The prediction for one layout: seconds of an iteration, and of the sums inside a replica."""

    iteration_s: float
    tensor_parallel_s: float

    def is_faster_than(self, other: _Predicted) -> bool:
        """Even if the messages whose cost is known least take longer than predicted."""
        return self.iteration_s + UNSURE * max(0.0, self.tensor_parallel_s - other.tensor_parallel_s) < other.iteration_s


def _predicted(layout: Layout, *, situation: Situation, speeds: Mapping[str, float]) -> _Predicted:
    workload = situation.workload
    compute_s = situation.forecast(layout, speeds).slowest / workload.work_flop
    cluster = at_paces(situation.cluster, situation.paces(speeds))
    price = AlphaBetaCost().price(layout, cluster=cluster, workload=workload)
    iteration_s = compute_s + price.tensor_parallel + price.gradients
    return _Predicted(iteration_s=iteration_s, tensor_parallel_s=price.tensor_parallel)


def _behind(situation: Situation) -> list[str]:
    """The processors behind slow links, where they are alone on their host and few."""
    hosts: dict[str, list[str]] = defaultdict(list)
    for name in situation.layout.processors:
        hosts[situation.cluster.by_name[name].host].append(name)
    alone = [hosts[host][0] for host in situation.slow_hosts if len(hosts[host]) == 1]
    return alone[:_MOST_BEHIND] if len(situation.layout.processors) > 1 else []


def _swapped(situation: Situation, speeds: Mapping[str, float]) -> Layout:
    """The replicas as they are, but for one processor behind a slow link, exchanged with the one that makes it fastest.

    Planners order processors by speed and host; that two of them should not meet is known only here.
    """
    now, workload = situation.layout, situation.workload
    best, least_s = now, iteration_s(now, situation=situation, speeds=speeds)
    names = now.processors
    behind = [name for name in names if situation.cluster.by_name[name].host in situation.slow_hosts[:_MOST_BEHIND]]
    if len(names) > _MOST_SWAPPED:
        return now
    plain = with_speeds(situation.cluster, speeds).by_name
    for one in behind:
        for other in names:
            places = {one: other, other: one}
            replicas = [[plain[places.get(name, name)] for name in replica.processors] for replica in now.replicas]
            layout = balanced(replicas, workload=workload)
            if other == one or layout is None or layout.empty(workload):
                continue
            takes_s = iteration_s(layout, situation=situation, speeds=speeds)
            if takes_s < least_s and not lacking_bytes(layout, cluster=situation.cluster, workload=workload):
                best, least_s = layout, takes_s
    return best


def shift_samples(layout: Layout, *, speeds: Mapping[str, float], workload: Workload) -> Layout:
    """Other widths, so that all replicas are done at once; no units move, and so no weights."""
    rates = []
    for replica in layout.replicas:
        alone = Layout(replicas=(replica.as_wide_as(1.0),))
        rates.append(1.0 / forecast(alone, workload=workload, speeds=speeds).slowest)
    total = sum(rates)
    return Layout(
        replicas=tuple(replica.as_wide_as(rate / total) for rate, replica in zip(rates, layout.replicas, strict=True))
    )


def rows_s(old: Layout, new: Layout, *, cluster: Cluster, workload: Workload) -> float:
    """Seconds for the rows of weights and optimizer state to move: every processor sends and receives over its links."""
    sizes: dict[tuple[str, str], float] = defaultdict(float)
    before, after = old.cut_blocks(workload), new.cut_blocks(workload)
    for block, one, two in zip(workload.blocks, before, after, strict=True):
        unit_bytes = workload.unit_moved_bytes(block)
        for move in moves(one, two):
            sizes[move.source, move.dest] += move.units.size * unit_bytes
    return carried_s(sizes, cluster=cluster)


def carried_s(sizes: Mapping[tuple[str, str], float], *, cluster: Cluster) -> float:
    """Seconds until all bytes have gone from their sources to their destinations, each processor with one message at a time."""
    busy_s: dict[str, float] = defaultdict(float)
    for (source, dest), size_bytes in sizes.items():
        took_s = cluster.link(source, dest).transfer_s(size_bytes)
        busy_s[source] += took_s
        busy_s[dest] += took_s
    return max(busy_s.values(), default=0.0)
