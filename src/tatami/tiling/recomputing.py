"""Layouts whose ranks compute activations once more: which cannot be, and how a sentence says who does."""

from __future__ import annotations

from tatami.errors import PlanError
from tatami.tiling.layout import Layout
from tatami.workload import Workload


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
