"""The picture of a run: seconds per iteration over its iterations, and where it was re-tiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS: dict[str, tuple[str, str, str]] = {
    "whole": ("s", "#b5392f", "re-mapping of the whole"),
    "column": ("^", "#d98b1f", "re-mapping within columns"),
}


@dataclass(frozen=True, kw_only=True)
class CoursePoint:
    """One point of the curve: a check of the balance, and the time of the iterations before it.

    Attributes:
        iteration: after which iteration it was taken.
        iteration_s: seconds per iteration since the check before.
        remapping: what was re-tiled at this check; None where nothing was.
    """

    iteration: int
    iteration_s: float
    remapping: Literal["whole", "column"] | None = None


def draw_course(ax: Axes, checks: Sequence[CoursePoint], *, label: str = "time per iteration") -> Axes:
    """Draw the time per iteration over the iterations, with every re-mapping marked (as Fig. 12 of the paper).

    Called again on the same `ax`, it adds another run to compare with; each needs its own `label`.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    ax.plot(
        [check.iteration for check in checks],
        [check.iteration_s for check in checks],
        marker="o",
        markersize=3.5,
        linewidth=1.4,
        label=label,
    )
    named = {str(line.get_label()) for line in ax.get_lines()}
    for kind, (marker, colour, name) in MARKS.items():
        marked = [check for check in checks if check.remapping == kind]
        if marked:
            ax.plot(
                [check.iteration for check in marked],
                [check.iteration_s for check in marked],
                linestyle="none",
                marker=marker,
                markersize=9,
                markerfacecolor=colour,
                markeredgecolor="white",
                # A second run's marks mean the same as the first's: one line of the legend for both.
                label="_" if name in named else name,
                zorder=3,
            )
    ax.set_xlabel("iteration")
    ax.set_ylabel("time per iteration")
    ax.yaxis.set_major_formatter(EngFormatter(unit="s"))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    # Of all runs drawn so far: autoscale knows them, and the axis begins at 0 so that heights compare as times do.
    ax.set_ylim(auto=True)
    ax.autoscale_view()
    ax.set_ylim(0, 1.05 * ax.get_ylim()[1], auto=True)
    ax.grid(axis="y", alpha=0.3)
    ax.legend(loc="best", frameon=False, fontsize=9)
    return ax
