"""The share of a run's time that deaths cost, over mean lives and numbers of machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HOUR_S = 3600.0
_STYLES = ("solid", "dashed", "dotted")


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """Of runs that differ in nothing but chance.

    Attributes:
        machines: how many.
        mtbf_s: the mean life of each.
        policy: what follows a death.
        lost_fraction: of the whole time.
    """

    machines: int
    mtbf_s: float
    policy: str
    lost_fraction: float


def draw_lost(ax: Axes, points: Sequence[LossPoint]) -> Axes:
    """Lines over mean lives, one for each number of machines and policy; over machines where there is one mean life only."""
    policies = list(dict.fromkeys(point.policy for point in points))
    over_machines = len({point.mtbf_s for point in points}) < 2
    kinds = sorted({point.mtbf_s if over_machines else point.machines for point in points})
    for place, kind in enumerate(kinds):
        for policy, style in zip(policies, _STYLES, strict=False):
            line = sorted(
                (point.machines if over_machines else point.mtbf_s / _HOUR_S, 100 * point.lost_fraction)
                for point in points
                if point.policy == policy and kind == (point.mtbf_s if over_machines else point.machines)
            )
            label = policy if over_machines else f"{kind:,} machines, {policy}"
            if line:
                ax.plot(*zip(*line, strict=True), color=f"C{place}", linestyle=style, marker="o", label=label)
    ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("machines" if over_machines else "mean life of a machine, hours")
    ax.set_ylabel("% of the time lost")
    ax.grid(alpha=0.25)
    if points:
        ax.legend(frameon=False)
    return ax
