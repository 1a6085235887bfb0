"""A layout made to fit into memory: in micro-batches, with other shares, or by recomputation, whichever is cheapest."""

from __future__ import annotations

from collections.abc import Iterator

from tatami.cluster import Cluster
from tatami.tiling.compute import repeated
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout
from tatami.tiling.memory import in_fewest_micro_batches, lacking_bytes, squeezed
from tatami.workload import Workload

_NO_LOSS = 1.01
"""Micro-batches that lengthen an iteration by less are taken without looking for other shares, which takes 10 ms and more."""
_MOST_DOUBLINGS = 10
_MOST_REPLICAS = 16
"""Most replicas of which single ones are tried with more micro-batches, too; all together always are."""
WORTH_IT = 0.05
"""Fraction of an iteration that must be saved by micro-batches beyond those that memory needs, or by recomputation where memory
does without."""


def with_room(
    layout: Layout, *, cluster: Cluster, workload: Workload, cost: AbstractCost, ranks: int | None = None
) -> Layout | None:
    """The cheapest layout of the same processors in the same replicas that memory holds; None where it holds none.

    The shares stay where micro-batches alone make room, unless their calls and sums take long. Other shares give less to those
    with little memory: fewer samples, and where one sample is too much, fewer units.
    Ranks recompute activations (`Workload.recompute`) where there is no room otherwise, or where that takes clearly less time
    than micro-batches and other shares.

    Args:
        layout: the shares; its number of micro-batches does not count.
        cluster: the processors, with their memory.
        workload: what is laid out; says in how many micro-batches, if a number was asked for.
        cost: prices what may be chosen from.
        ranks: of the run; None: those of the cluster.
    """
    plain = layout if workload.micro_batches is None else layout.in_micro_batches(workload.micro_batches)
    plain = plain.recomputing() if workload.recompute else plain
    if not cluster.memory_known or not lacking_bytes(plain, cluster=cluster, workload=workload, ranks=ranks):
        return plain

    def price(layout: Layout) -> float:
        return cost.price(layout, cluster=cluster, workload=workload).total

    def found() -> Iterator[Layout]:
        fewest = in_fewest_micro_batches(plain, cluster=cluster, workload=workload, ranks=ranks)
        if fewest is not None:
            yield fewest
            if price(fewest) <= _NO_LOSS * price(plain):
                return
        same = squeezed(plain, cluster=cluster, workload=workload, ranks=ranks)
        if same is not None:
            yield same
        if fewest is None and workload.micro_batches is None and workload.most_micro_batches > 1:
            single = squeezed(plain.in_micro_batches(workload.samples), cluster=cluster, workload=workload, ranks=ranks)
            held = single and in_fewest_micro_batches(single, cluster=cluster, workload=workload, ranks=ranks)
            if held is not None:
                yield held

    best = min(found(), key=price, default=None)
    if not workload.may_recompute or workload.recompute or (best is not None and price(best) <= _NO_LOSS * price(plain)):
        return best
    again = min(_recomputing(plain, cluster=cluster, workload=workload, ranks=ranks), key=price, default=None)
    if best is None or again is None:
        return again if best is None else best
    return again if price(again) < (1 - WORTH_IT) * price(best) else best


def _recomputing(layout: Layout, *, cluster: Cluster, workload: Workload, ranks: int | None) -> Iterator[Layout]:
    """Layouts of the same processors in the same replicas that memory holds because some or all recompute activations.

    Those that recompute take longer for a sample, so that others are given more of them. Batch statistics are summed over all
    ranks once more, so there all recompute.
    """
    everyone = layout.recomputing()
    lacking = lacking_bytes(layout, cluster=cluster, workload=workload, ranks=ranks)
    some = everyone if workload.batch_statistics else layout.recomputing(lacking)
    widths = [replica.width / times for replica, times in zip(some.replicas, repeated(some, workload=workload), strict=True)]
    even = Layout(
        replicas=tuple(
            replica.as_wide_as(float(width / sum(widths))) for replica, width in zip(some.replicas, widths, strict=True)
        )
    )
    for each in dict.fromkeys((some, even, everyone)):
        held = in_fewest_micro_batches(each, cluster=cluster, workload=workload, ranks=ranks)
        if held is not None:
            yield held
    for each in (everyone, everyone.in_micro_batches(min(workload.most_micro_batches, workload.samples))):
        other = squeezed(each, cluster=cluster, workload=workload, ranks=ranks)
        held = other and in_fewest_micro_batches(other, cluster=cluster, workload=workload, ranks=ranks)
        if held is not None:
            yield held


def at_best_sizes(layout: Layout, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:
    """The same layout in more micro-batches, where speeds depend on the size of a tile and smaller ones are faster.

    The number doubles for all replicas, then, of few replicas, for each by itself, as long as that is cheaper.
    """
    if not cluster.sized or workload.micro_batches is not None:
        return layout
    best, least = layout, cost.price(layout, cluster=cluster, workload=workload).total
    most = min(workload.most_micro_batches, workload.samples)
    replicas = range(len(layout.replicas))
    for chosen in [replicas, *([index] for index in replicas if 1 < len(replicas) <= _MOST_REPLICAS)]:
        for _ in range(_MOST_DOUBLINGS):
            more = Layout(
                replicas=tuple(
                    replica.in_micro_batches(min(most, 2 * replica.micro_batches)) if index in chosen else replica
                    for index, replica in enumerate(best.replicas)
                )
            )
            price = cost.price(more, cluster=cluster, workload=workload).total
            if price >= (1 - WORTH_IT) * least:
                break
            best, least = more, price
    return best
