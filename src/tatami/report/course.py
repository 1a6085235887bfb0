"""The picture of a run: seconds per iteration over its iterations, and where it was re-tiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tatami.report.palette import LINES, OCHRE, RUST

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS: dict[str, tuple[str, str, str]] = {
    "whole": ("s", RUST, "re-mapping of the whole"),
    "replica": ("^", OCHRE, "re-mapping within replicas"),
}


LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1, 1, 1)))


@dataclass(frozen=True, kw_only=True)
class CoursePoint:
    """One stretch of the curve, which ends at a check of the balance or where it is cut.

    Attributes:
        iteration: the last of the stretch.
        iteration_s: seconds per iteration in it.
        remapping: what was re-tiled at its end; None where nothing was.
    """

    iteration: int
    iteration_s: float
    remapping: Literal["whole", "replica"] | None = None


def draw_course(ax: Axes, checks: Sequence[CoursePoint], *, label: str = "time per iteration") -> Axes:
    """Draw the time per iteration over the iterations, with every re-mapping marked (as Fig. 12 of the paper).

    Called again on the same `ax`, it adds another run to compare with; each needs its own `label`.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if checks:
        # Each time is that of a stretch, the first one's from the beginning; lines differ in dashes, too, for print in grey.
        num_runs = sum(line.get_drawstyle() == "steps-pre" for line in ax.get_lines())
        times_s = [check.iteration_s for check in checks]
        ax.plot(
            [0, *(check.iteration for check in checks)],
            [times_s[0], *times_s],
            drawstyle="steps-pre",
            linestyle=LINE_STYLES[num_runs % len(LINE_STYLES)],
            color=LINES[num_runs % len(LINES)],
            linewidth=1.8,
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
