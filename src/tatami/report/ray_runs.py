"""Runs on Ray over time: the ranks of an elastic run and the rounds of a parameter server, and what deaths cost them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tatami.report.palette import MOSS, OCHRE, RUST
from tatami.units import format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tatami.report.elastic_run import ElasticReport
    from tatami.report.server_run import RunReport


_COLOURS = {"died": RUST, "hung": OCHRE}
_LINES = {"died": ("--", "its death is noticed"), "hung": (":", "its silence is noticed")}


def draw_members(ax: Axes, report: ElasticReport) -> Axes:
    """A bar for each rank, from when it was let in to when it left or died, and a stripe over all for each time lost."""
    came_s = dict.fromkeys(report.first_members, 0.0)
    bars: dict[str, list[tuple[float, float]]] = {name: [] for name in came_s}
    for change in report.changes:
        for name in [name for name in came_s if name not in change.members]:
            bars[name].append((came_s[name], change.at_s - came_s.pop(name)))
        for name in change.members:
            bars.setdefault(name, [])
            came_s.setdefault(name, change.at_s + change.halted_s + change.laid_s)
    for name, since_s in came_s.items():
        bars[name].append((since_s, report.total_s - since_s))
    for place, spans in enumerate(bars.values()):
        ax.broken_barh(spans, (place - 0.4, 0.8), color="C0")
    for change in report.changes:
        ends_s = change.at_s + change.halted_s + change.laid_s
        ax.axvspan(ends_s - change.lost_s, ends_s, color="C3", alpha=0.4, linewidth=0)
        again = f", {change.steps_lost} steps" if change.steps_lost else ""
        told = f"{format_duration(change.lost_s, digits=2)}{again}"
        ax.annotate(told, (ends_s, len(bars) - 0.5), rotation=45, fontsize="small", annotation_clip=False)
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set_xlabel("seconds since the first step")
    ax.set_title(
        f"{format_duration(report.lost_s, digits=3)} of {format_duration(report.total_s, digits=3)} lost", loc="left", pad=30
    )
    return ax


def draw_timeline(ax: Axes, report: RunReport) -> Axes:
    """Draw the rounds done over the seconds, with each failure marked when it was noticed."""
    versions = range(report.start, report.start + len(report.reached_s))
    ax.step(report.reached_s, versions, where="post", linewidth=1.4, color=MOSS)
    named: set[str] = set()
    for failure in report.failures:
        colour = _COLOURS[failure.how]
        style, label = _LINES[failure.how]
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
