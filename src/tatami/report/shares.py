"""The picture of a balance: each processor's share of the work against its share of the speed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tatami.report.palette import GREY, MOSS
from tatami.report.words import check_speeds, idle, share, working
from tatami.tiling import Tiling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG_FROM_RATIO = 20.0
TITLE_CHARS = 80
SAME_POINT = 0.02
"""Processors whose shares differ by less than this, relatively, are drawn as one point with all their names."""
LABEL_PLACES_PT = ((7, -3), (-7, -3), (0, 8), (0, -14), (7, 8), (-7, 8), (7, -14), (-7, -14))


@dataclass(frozen=True, kw_only=True)
class _Point:
    speed_percent: float
    work_percent: float
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        if len(self.names) <= 2:
            return ", ".join(self.names)
        return f"{self.names[0]} ... {self.names[-1]} ({len(self.names)})"

    @property
    def imbalance(self) -> float:
        """The distance from the diagonal, on either side."""
        ratio = self.work_percent / self.speed_percent
        return max(ratio, 1 / ratio)


def draw_shares(ax: Axes, tiling: Tiling, *, speeds: Mapping[str, float]) -> Axes:
    """Draw each processor's percentage of the work over its percentage of the speed; on the diagonal no processor waits.

    Names that would lie on others are left out, those nearest the diagonal first.

    Raises:
        PlanError: a processor of the tiling has no speed.
    """
    from matplotlib.ticker import FuncFormatter

    check_speeds(tiling, speeds=speeds)
    points = _points(tiling, speeds=speeds)
    low = min(min(point.speed_percent, point.work_percent) for point in points)
    high = max(max(point.speed_percent, point.work_percent) for point in points)
    if high / low > LOG_FROM_RATIO:
        ax.set_xscale("log")
        ax.set_yscale("log")
        limits = (low / 1.8, min(100.0, high) * 1.8)
    else:
        limits = (0.0, 1.15 * high)
    ax.set_xlim(limits)
    ax.set_ylim(limits)
    ax.plot(limits, limits, color=GREY, linewidth=1, linestyle="--", label="no processor waits", zorder=1)
    ax.scatter(
        [point.speed_percent for point in points],
        [point.work_percent for point in points],
        s=34,
        color=MOSS,
        edgecolor="white",
        zorder=2,
    )
    ax.set_xlabel("share of the speed (%)")
    ax.set_ylabel("share of the work (%)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:g}"))
    ax.set_aspect("equal")
    ax.grid(alpha=0.25)
    ax.legend(loc="upper left", frameon=False, fontsize=9)
    unused = idle(tiling, speeds=speeds)
    if unused:
        ax.set_title(textwrap.fill(f"without work: {', '.join(unused)}", TITLE_CHARS), fontsize=9)
    _name_points(ax, points)
    return ax


def _points(tiling: Tiling, *, speeds: Mapping[str, float]) -> list[_Point]:
    total = sum(speeds.values())
    singles = sorted(
        (100 * speeds[tile.processor] / total, 100 * share(tile, tiling=tiling), tile.processor) for tile in working(tiling)
    )
    points: list[_Point] = []
    for speed, work, name in singles:
        near = next((index for index, point in enumerate(points) if _same(point, speed=speed, work=work)), None)
        if near is None:
            points.append(_Point(speed_percent=speed, work_percent=work, names=(name,)))
        else:
            first = points[near]
            points[near] = _Point(
                speed_percent=first.speed_percent, work_percent=first.work_percent, names=(*first.names, name)
            )
    return points


def _same(point: _Point, *, speed: float, work: float) -> bool:
    return abs(point.speed_percent - speed) <= SAME_POINT * speed and abs(point.work_percent - work) <= SAME_POINT * work


def _name_points(ax: Axes, points: Sequence[_Point]) -> None:
    """Greedy: the worst balanced first, each at the first of eight places where it covers nothing."""
    from matplotlib.transforms import Bbox

    ax.figure.figure.draw_without_rendering()  # the constrained layout is known only now
    area = ax.get_window_extent()
    spots = ax.transData.transform([(point.speed_percent, point.work_percent) for point in points])
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in spots]
    legend = ax.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    for point in sorted(points, key=lambda point: -point.imbalance):
        for across, up in LABEL_PLACES_PT:
            text = ax.annotate(
                point.label,
                (point.speed_percent, point.work_percent),
                xytext=(across, up),
                textcoords="offset points",
                ha={1: "left", 0: "center", -1: "right"}[(across > 0) - (across < 0)],
                fontsize=8,
            )
            box = text.get_window_extent()
            inside = area.x0 <= box.x0 and box.x1 <= area.x1 and area.y0 <= box.y0 and box.y1 <= area.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()
