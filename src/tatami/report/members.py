"""Who was in an elastic run from when to when, and the seconds that each change cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tatami.units import format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tatami.elastic.report import ElasticReport


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
