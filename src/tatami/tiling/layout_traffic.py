"""What an iteration of a network in a layout sends, where blocks of the workload may be several blocks of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tatami.tiling.layout import Layout
from tatami.tiling.tiling import Tiling
from tatami.tiling.traffic import Traffic, gradient_sums, riding_elements, traffic_of
from tatami.workload import Workload


def layout_traffic(
    layout: Layout,
    *,
    workload: Workload,
    tilings: Sequence[Tiling],
    trained: Sequence[int],
    names: Sequence[str],
    hosts: Mapping[str, str],
    rates: Mapping[str, float] | None,
) -> Traffic:
    """What an iteration over a batch of the planned size sends, message by message, as simulator and cost model have it.

    Args:
        layout: of the ranks.
        workload: of the network.
        tilings: the layout, cut for each block of the network; one in all where it has none.
        trained: elements of one unit of each of these blocks that have gradients.
        names: the processor of every rank.
        hosts: the host of each processor.
        rates: see `transfer_rates`.
    """
    planned = layout.cut_blocks(workload) or tuple(tilings)
    found = traffic_of(
        planned,
        workload=workload,
        names=names,
        hosts=hosts,
        rates=rates,
        micro_batches=[replica.micro_batches for replica in layout.replicas],
        recomputes=[replica.recomputes for replica in layout.replicas],
    )
    if len(tilings) == len(planned):
        return found
    # A block of the workload is several of the network, such as experts, whose gradients travel each by its own tiling.
    gradients = gradient_sums(
        tilings,
        unit_elements=trained,
        riders=riding_elements(workload, replicas=len(tilings[0].replicas)),
        element_bytes=workload.element_bytes,
        wire=workload.wire,
        names=names,
        hosts=hosts,
        rates=rates,
    )
    return replace(found, gradients=gradients)
