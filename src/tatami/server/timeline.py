"""The picture of a run: how long each round took, and who failed when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tatami.server.report import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"died": "#b5392f", "hung": "#d98b1f"}
LINES = {"died": ("--", "its death is noticed"), "hung": (":", "its silence is noticed")}


def draw_timeline(ax: Axes, report: RunReport) -> Axes:
    """Draw the rounds done over the seconds, with each failure marked when it was noticed."""
    versions = range(report.start, report.start + len(report.reached_s))
    ax.step(report.reached_s, versions, where="post", linewidth=1.4, color="#33557a")
    named: set[str] = set()
    for failure in report.failures:
        colour = COLOURS[failure.how]
        style, label = LINES[failure.how]
        label = "_" if failure.how in named else label
        ax.axvline(failure.at_s, color=colour, linewidth=1.4, linestyle=style, label=label)
        place = (failure.at_s, failure.round)
        ax.annotate(failure.who, place, xytext=(4, -12), textcoords="offset points", color=colour, fontsize=9)
        named.add(failure.how)
    ax.set_xlabel("seconds since the first round began")
    ax.set_ylabel("rounds applied")
    ax.set_title(f"recovery: {report.recovery}, failures: {len(report.failures)}")
    ax.grid(alpha=0.3)
    if named:
        ax.legend(loc="lower right", framealpha=1, edgecolor="none")
    return ax
