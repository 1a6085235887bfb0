"""Pictures of the evaluation: efficiency (Fig. 11), courses (Fig. 12 and 13), breakdown, rivals, model against measurement."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from paper.tables import METHODS, PARTS, Record, measured, predicted
from tatami.report.course import CoursePoint, draw_course
from tatami.units import format_bandwidth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES: dict[str, tuple[str, str]] = {
    "even": ("#8c8c8c", "o"),
    "h": ("#d9b98a", "s"),
    "h-rev": ("#b07d3c", "s"),
    "weighted": ("#7f5fa8", "^"),
    "srpm": ("#2f6db3", "D"),
    "srpm-merged": ("#6fb1e0", "v"),
    "timed": ("#3a9188", "P"),
    "timed-bfloat16": ("#7cc3ba", "p"),
    "drpm": ("#b5392f", "o"),
    "drpm-speeds": ("#e58a6b", "s"),
    "drpm-timed": ("#8a2a5b", "X"),
    "drpm-timed-speeds": ("#d07fb0", "*"),
    "ddp": ("#8c8c8c", "o"),
    "ddp-weighted": ("#4d4d4d", "^"),
    "ddp-weighted-float16": ("#1f1f1f", "v"),
}
"""Colour and marker of every method."""
PART_COLOURS = {
    "compute": "#2f6db3",
    "waiting": "#d9d9d9",
    "tensor_parallel": "#d98b1f",
    "gradients": "#b5392f",
    "overhead": "#4d4d4d",
}
_EVERY = 5
"""Iterations that one point of a course is the mean of."""
_BAND = 0.15


def draw_efficiency(ax: Axes, records: Sequence[Record], *, condition: str, net: str) -> Axes:
    """Gamma over the number of processors, one line for each method."""
    found = measured(records, part="efficiency", condition=condition, net=net)
    for method in METHODS:
        own = [each for each in found if each["method"] == method and each["efficiency"] is not None]
        if own:
            colour, marker = STYLES[method]
            ax.plot(
                [each["num"] for each in own],
                [each["efficiency"] for each in own],
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.4,
                label=METHODS[method],
            )
    if any((each["efficiency"] or 0.0) > 0.5 for each in found):  # else all would lie at the bottom
        ax.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    ax.set_xlabel("processors")
    ax.set_ylabel("parallel efficiency")
    ax.set_xticks(sorted({each["num"] for each in found}))
    ax.set_ylim(0, None)
    samples = found[0]["samples"] if found else 0
    ax.set_title(f"condition {condition}: {net}, {samples:,} samples", fontsize=10)
    ax.grid(axis="y", alpha=0.3)
    return ax


def draw_breakdown(ax: Axes, records: Sequence[Record], *, condition: str, net: str, num: int) -> Axes:
    """A bar for each method, of what an iteration's time went to; means over the ranks."""
    found = [
        each for each in measured(records, part="efficiency", condition=condition, net=net, num=num) if "breakdown" in each
    ]
    places = range(len(found))
    left = [0.0] * len(found)
    for part in PARTS:
        lengths = [1e3 * each["breakdown"][f"{part}_s"] for each in found]
        ax.barh(places, lengths, left=left, color=PART_COLOURS[part], label=PARTS[part], height=0.7)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    ax.set_yticks(places, [METHODS[each["method"]] for each in found])
    ax.invert_yaxis()
    ax.set_xlabel("time of an iteration (ms)")
    ax.set_title(
        f"condition {condition}, {num} processors: {net}, {found[0]['samples'] if found else 0:,} samples", fontsize=10
    )
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False, fontsize=9)
    return ax


def draw_courses(ax: Axes, records: Sequence[Record], *, contestants: Sequence[str], labels: Sequence[str]) -> Axes:
    """The time per iteration of several runs, with their re-mappings, and the change of speed in mid-run."""
    courses = {each["contestant"]: each for each in records if each["record"] == "course"}
    shown = [(courses[name], label) for name, label in zip(contestants, labels, strict=True) if name in courses]
    for each, label in shown:
        draw_course(ax, _points(each), label=label)
    steps = {each["step"]["after_iteration"]: each["step"] for each, _ in shown if each["step"] is not None}
    for iteration, step in steps.items():
        ax.axvline(iteration, color="black", linewidth=0.8, linestyle="--")
        ax.annotate(
            f" {step['host']} slows to {step['speed']:g}",
            (iteration, 0.02),
            xycoords=("data", "axes fraction"),
            fontsize=8,
        )
    return ax


def draw_rivals(ax: Axes, records: Sequence[Record]) -> Axes:
    """Iterations per second of every method, a group of bars for each rate of the links."""
    rates = sorted({each["bandwidth_bytes_per_s"] for each in records if each["part"] == "rivals"})
    found = {
        rate: {each["method"]: each for each in measured(records, part="rivals", bandwidth_bytes_per_s=rate)} for rate in rates
    }
    methods = [name for name in METHODS if any(name in own for own in found.values())]
    width = 0.8 / max(1, len(methods))
    for index, method in enumerate(methods):
        places = [place + (index - (len(methods) - 1) / 2) * width for place, rate in enumerate(rates) if method in found[rate]]
        heights = [1 / found[rate][method]["iteration_s"] for rate in rates if method in found[rate]]
        bars = ax.bar(places, heights, width=0.92 * width, color=_rival_colour(method), label=METHODS[method])
        ax.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    ax.set_xticks(range(len(rates)), [f"links of {format_bandwidth(rate)}" for rate in rates])
    ax.set_ylabel("iterations per second")
    ax.margins(y=0.1)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False, fontsize=9)
    return ax


def draw_model(ax: Axes, records: Sequence[Record]) -> Axes:
    """Predicted over measured time of an iteration, a point for each tiling."""
    found = predicted(records)
    nets = sorted({each["net"] for each in found}, reverse=True)
    for method in METHODS:
        for net, filled in zip(nets, (True, False), strict=False):
            own = [each for each in found if each["method"] == method and each["net"] == net]
            if own:
                colour, marker = STYLES[method]
                ax.plot(
                    [1e3 * each["iteration_s"] for each in own],
                    [1e3 * each["predicted_s"] for each in own],
                    linestyle="none",
                    marker=marker,
                    markersize=5,
                    color=colour,
                    markerfacecolor=colour if filled else "none",
                    label=METHODS[method] if filled else "_",
                )
    seconds = [value for each in found for value in (1e3 * each["iteration_s"], 1e3 * each["predicted_s"])]
    ends = [0.8 * min(seconds), 1.25 * max(seconds)]
    ax.plot(ends, ends, color="black", linewidth=0.8)
    ax.fill_between(ends, [(1 - _BAND) * end for end in ends], [(1 + _BAND) * end for end in ends], color="black", alpha=0.08)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    ax.set_aspect("equal")
    ax.set_xlabel("measured time of an iteration (ms)")
    ax.set_ylabel("predicted time (ms)")
    hollow = f"; hollow: {nets[1]}" if len(nets) > 1 else ""
    ax.set_title(f"filled: {nets[0]}{hollow}; the band is {_BAND:.0%} wide to each side", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=9)
    return ax


def _points(course: Record) -> list[CoursePoint]:
    """Means over a few iterations, each with what was re-mapped among them."""
    seconds = course["iteration_s"]
    moves: dict[int, Literal["whole", "replica"]] = {
        check["iteration"]: "whole" if check["kind"].endswith("whole") else "replica"
        for check in course["checks"]
        if check["kind"] != "keep"
    }
    points = []
    for start in range(0, len(seconds), _EVERY):
        stop = min(start + _EVERY, len(seconds))
        remapping = next((kind for iteration, kind in moves.items() if start < iteration <= stop), None)
        points.append(CoursePoint(iteration=stop, iteration_s=fmean(seconds[start:stop]), remapping=remapping))
    return points


def _rival_colour(method: str) -> str:
    lighter = {"ddp": "#c9c9c9", "ddp-weighted": "#8c8c8c", "ddp-weighted-float16": "#5c5c5c"}
    return lighter.get(method) or STYLES[method][0]
