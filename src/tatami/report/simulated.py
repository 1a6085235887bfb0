"""Simulated runs as bars: the time of a run with its deviation, and what a failure cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class SimulatedRun(Protocol):
    """What is drawn of a run."""

    @property
    def total_s(self) -> float: ...

    @property
    def undisturbed_s(self) -> float: ...

    @property
    def num_failures(self) -> int: ...


def draw_server_runs(ax: Axes, labels: Sequence[str], runs: Sequence[Sequence[SimulatedRun]]) -> Axes:
    """A bar for every kind of run: seconds beyond an undisturbed run, their deviation, and how many for each failure.

    Args:
        labels: one for each kind.
        runs: of each kind, at least one.
    """
    extras = [[run.total_s - run.undisturbed_s for run in kind] for kind in runs]
    places = list(range(len(labels)))
    heights = [statistics.fmean(extra) for extra in extras]
    deviations = [statistics.pstdev(extra) for extra in extras]
    ax.bar(places, heights, yerr=deviations, capsize=4, color="#4c72b0")
    for place, extra, kind in zip(places, extras, runs, strict=True):
        failures = sum(run.num_failures for run in kind)
        text = f"{sum(extra) / failures:+.1f} s\na failure" if failures else "no failure"
        ax.annotate(
            text,
            (place, max(0.0, heights[place]) + deviations[place]),
            ha="center",
            va="bottom",
            xytext=(0, 3),
            textcoords="offset points",
        )
    ax.set_xticks(places, list(labels))
    ax.margins(y=0.2)
    ax.set_ylabel("seconds longer than undisturbed")
    ax.set_title(f"{len(runs[0])} simulated runs of each")
    return ax
