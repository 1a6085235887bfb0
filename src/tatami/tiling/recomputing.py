"""Layouts whose ranks compute activations once more: which cannot be, and how a sentence says who does."""

from __future__ import annotations

from tatami.errors import PlanError
from tatami.tiling.layout import Layout
from tatami.tiling.staged_layout import StagedLayout
from tatami.tiling.staged_price import recomputable
from tatami.workload import Workload


def recomputing_stages(layout: StagedLayout, *, workload: Workload) -> StagedLayout:
    """The same layout, where all stages recompute that can.

    Raises:
        PlanError: none can.
    """
    stages = recomputable(layout, workload)
    if not stages:
        raise PlanError(
            "activations are to be recomputed, and no stage of this layout has a whole repeated layer that can be computed "
            "once more (docs/networks.md, Memory): cut in front of other pieces, or leave recomputation out"
        )
    return layout.recomputing(stages)


def refuse_recomputation(layout: Layout, *, workload: Workload) -> None:
    """
    Raises:
        PlanError: processors of the layout are to recompute activations, and this network has no layers that can be computed
            once more, or has batch statistics, which all ranks sum together, and not all recompute.
    """
    names = layout.recomputes
    if names and workload.recomputation is None:
        raise PlanError(
            f"{names[0]} is to recompute activations, and this network has no repeated layers that can be computed once more "
            "(docs/networks.md, Memory): leave recomputation out, or give tatami.tile a sample"
        )
    if names and workload.batch_statistics and len(names) < len(layout.processors):
        raise PlanError(
            f"{names[0]} is to recompute activations and others are not, and this network has batch normalization, whose "
            "statistics all ranks sum once more together: have all recompute, or none"
        )
