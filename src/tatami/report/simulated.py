"""Pictures of rehearsals: the share of time that deaths cost, over mean lives; the time of runs, and what a failure cost.

The bars, with deviations, are those of Li, Tanimura and Nakada, Figs. 12 and 13.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tatami.report.palette import MOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HOUR_S = 3600.0
_STYLES = ("solid", "dashed", "dotted")


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """Losses of runs that differ in nothing but chance.

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


_COLOR = MOSS
_ROOM = 0.15
"""Below and above the bars, of what they differ by."""


class SimulatedRun(Protocol):
    """What is drawn of a run."""

    @property
    def total_s(self) -> float: ...

    @property
    def undisturbed_s(self) -> float: ...

    @property
    def num_failures(self) -> int: ...

    @property
    def lost_per_failure_s(self) -> float | None: ...


def draw_totals(ax: Axes, labels: Sequence[str], runs: Sequence[Sequence[SimulatedRun]]) -> Axes:
    """A bar for every kind of run: seconds of all its rounds; a mark where a run ends that nothing disturbs.

    The axis does not begin at 0, or one would see nothing but rounds, which are alike.

    Args:
        labels: one for each kind.
        runs: of each kind, at least one.
    """
    means, deviations = _bars(ax, labels, [[run.total_s for run in kind] for kind in runs])
    undisturbed = [kind[0].undisturbed_s for kind in runs]
    for place, at_s in enumerate(undisturbed):
        ax.hlines(at_s, place - 0.45, place + 0.45, colors="black", linestyles="dashed", label="_" if place else "undisturbed")
    lows = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    highs = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    low, high = min(*lows, *undisturbed), max(*highs, *undisturbed)
    room = _ROOM * (high - low) or 0.01 * high
    ax.set_ylim(low - room, high + 2 * room)
    ax.ticklabel_format(axis="y", useOffset=False, style="plain")
    ax.set_ylabel("seconds of a run (the axis does not begin at 0)")
    ax.set_title(f"{len(runs[0])} simulated runs of each")
    ax.legend(frameon=False, loc="upper right")
    return ax


def draw_losses(ax: Axes, labels: Sequence[str], runs: Sequence[Sequence[SimulatedRun]]) -> Axes:
    """A bar for every kind of run: seconds that a run took longer for each of its failures; runs without any are left out.

    Args:
        labels: one for each kind.
        runs: of each kind, at least one.
    """
    losses = [[lost_s for run in kind if (lost_s := run.lost_per_failure_s) is not None] for kind in runs]
    means, deviations = _bars(ax, labels, losses)
    for place, (mean, deviation, kind) in enumerate(zip(means, deviations, runs, strict=True)):
        failures = sum(run.num_failures for run in kind)
        text = f"{mean:+.1f} s" if failures else "no failure"
        at = (place, max(0.0, mean + deviation))
        ax.annotate(text, at, ha="center", va="bottom", xytext=(0, 3), textcoords="offset points")
    ax.axhline(0.0, color="black", linewidth=0.8)
    ax.margins(y=0.2)
    ax.set_ylabel("seconds lost by a failure")
    ax.set_title(f"{sum(run.num_failures for kind in runs for run in kind)} failures in {sum(map(len, runs))} simulated runs")
    return ax


def _bars(ax: Axes, labels: Sequence[str], values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Means with deviations, which are returned; 0 where there is no value."""
    means = [statistics.fmean(each) if each else 0.0 for each in values]
    deviations = [statistics.pstdev(each) if each else 0.0 for each in values]
    ax.bar(range(len(labels)), means, yerr=deviations, capsize=4, color=_COLOR)
    ax.set_xticks(range(len(labels)), list(labels))
    return means, deviations
