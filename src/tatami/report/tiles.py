"""The picture of a tiling: samples across, units down, one named tile per processor, coloured by its speed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tatami.report.fitting import Box, Lettering, fit_lettering
from tatami.report.palette import EDGE, STRAW_TO_MOSS, ink_on
from tatami.report.words import ALIKE, check_speeds, idle, in_order, percent, share, working
from tatami.tiling import Tile, Tiling

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar

LOG_FROM_RATIO = 10.0
"""Speeds further apart than this are coloured on a logarithmic scale, or all slow ones would look alike."""
NOTE_CHARS = 104
MAX_NOTE_ROWS = 8


def draw_tiling(ax: Axes, tiling: Tiling, *, speeds: Mapping[str, float], speed_unit: str = "relative") -> Axes:
    """Draw the tiles of `tiling` into `ax`, with a colour bar of the speeds beside it.

    A tile too small for its processor's name carries a number, explained below the picture. Processors in `speeds` that have
    no work are named there too.

    Args:
        ax: empty; sized as it will be saved, since lettering is fitted to it.
        tiling: what to draw.
        speeds: of every processor, by name.
        speed_unit: written at the colour bar.

    Raises:
        PlanError: a processor of the tiling has no speed.
    """
    from matplotlib.patches import Rectangle

    check_speeds(tiling, speeds=speeds)
    tiling = in_order(tiling, speeds)
    tiles = working(tiling)
    colours = _colours({tile.processor: speeds[tile.processor] for tile in tiles})
    for tile in tiles:
        corner = (tile.samples.start, tile.units.start)
        colour = _hex(colours, speeds[tile.processor])
        ax.add_patch(Rectangle(corner, tile.samples.size, tile.units.size, facecolor=colour, edgecolor=EDGE, linewidth=0.8))
    _axes(ax, tiling)
    bar = ax.figure.colorbar(colours, ax=ax, pad=0.02)
    bar.set_label(f"speed ({speed_unit})")
    _bar_ticks(bar, [speeds[tile.processor] for tile in tiles])
    _label(ax, tiling, speeds=speeds, colours=colours)
    return ax


def _axes(ax: Axes, tiling: Tiling) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(0, tiling.samples)
    ax.set_ylim(tiling.units, 0)
    cuts = [0, *(replica[0].samples.stop for replica in tiling.replicas)]
    # Ticks at the cuts between replicas tell more than round numbers, where there is room for them.
    if len(cuts) <= 9 and all(after - before >= 0.08 * tiling.samples for before, after in pairwise(cuts)):
        ax.set_xticks(cuts)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.set_xlabel(f"samples (of {tiling.samples})")
    ax.set_ylabel(f"hidden units (of {tiling.units})")


def _colours(speeds: Mapping[str, float]) -> ScalarMappable:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    low, high = min(speeds.values()), max(speeds.values())
    if low > (1 - ALIKE) * high:
        norm: Normalize = Normalize(0.5 * low, 1.5 * high)
    elif high / low > LOG_FROM_RATIO:
        norm = LogNorm(low, high)
    else:
        norm = Normalize(low, high)
    return ScalarMappable(norm=norm, cmap=LinearSegmentedColormap.from_list("straw_to_moss", STRAW_TO_MOSS))


def _bar_ticks(bar: Colorbar, speeds: list[float]) -> None:
    """The speeds themselves where they are few and apart; matplotlib's own ticks otherwise."""
    from matplotlib.ticker import FuncFormatter

    different = sorted(set(speeds))
    places = [float(bar.norm(speed)) for speed in different]
    if len(different) <= 6 and all(after - before > 0.05 for before, after in pairwise(places)):
        bar.set_ticks(different, labels=[f"{speed:.3g}" for speed in different])
    else:
        bar.formatter = FuncFormatter(lambda speed, _: f"{speed:g}")
    bar.minorticks_off()


def _label(ax: Axes, tiling: Tiling, *, speeds: Mapping[str, float], colours: ScalarMappable) -> None:
    """Name every tile. The note below the picture takes room from the tiles, so what fits is found out again with it."""
    tiles = working(tiling)
    unused = idle(tiling, speeds=speeds)
    lettering = _fit(ax, tiling, tiles=tiles)
    note = _note(lettering, tiling, tiles=tiles, unused=unused)
    if note:
        text = ax.annotate(
            note,
            (0, 0),
            xycoords="axes fraction",
            xytext=(0, -38),
            textcoords="offset points",
            va="top",
            fontsize=7.5,
            family="monospace",
        )
        lettering = _fit(ax, tiling, tiles=tiles)
        text.set_text(_note(lettering, tiling, tiles=tiles, unused=unused))
    for tile, letters in zip(tiles, lettering, strict=True):
        if not letters.text:
            continue
        ax.text(
            (tile.samples.start + tile.samples.stop) / 2,
            (tile.units.start + tile.units.stop) / 2,
            letters.text,
            ha="center",
            va="center",
            fontsize=letters.size_pt,
            rotation=90 if letters.upright else 0,
            color=ink_on(_hex(colours, speeds[tile.processor])),
            clip_on=True,
        )


def _fit(ax: Axes, tiling: Tiling, *, tiles: tuple[Tile, ...]) -> list[Lettering]:
    root = ax.figure.figure  # the figure itself, where `ax` lies in a part of it
    root.draw_without_rendering()  # the constrained layout is known only now
    area = ax.get_window_extent()
    points_per_pixel = 72 / root.dpi
    boxes = [
        Box(
            width_pt=tile.samples.size / tiling.samples * area.width * points_per_pixel,
            height_pt=tile.units.size / tiling.units * area.height * points_per_pixel,
        )
        for tile in tiles
    ]
    texts = [(tile.processor, percent(share(tile, tiling=tiling))) for tile in tiles]
    return fit_lettering(boxes, texts=texts)


def _note(lettering: list[Lettering], tiling: Tiling, *, tiles: tuple[Tile, ...], unused: tuple[str, ...]) -> str:
    """What the numbers mean, in columns; which processors have tiles too thin for a number; and which have no work."""
    keyed = [
        f"{letters.key} = {tile.processor} {percent(share(tile, tiling=tiling))}"
        for tile, letters in zip(tiles, lettering, strict=True)
        if letters.key is not None
    ]
    lines = []
    if keyed:
        width = max(map(len, keyed)) + 3
        per_row = max(1, NOTE_CHARS // width)
        rows = [keyed[start : start + per_row] for start in range(0, len(keyed), per_row)]
        lines = ["".join(entry.ljust(width) for entry in row).rstrip() for row in rows[:MAX_NOTE_ROWS]]
        if len(rows) > MAX_NOTE_ROWS:
            lines.append(f"... and {sum(map(len, rows[MAX_NOTE_ROWS:]))} more")
    for replica in tiling.replicas:
        thin = [tile for tile, letters in zip(tiles, lettering, strict=True) if not letters.text and tile in replica]
        if thin:
            names = [tile.processor for tile in thin]
            named = ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]} ({len(names)})"
            total = percent(sum(share(tile, tiling=tiling) for tile in thin))
            lines.append(f"too thin to label, in replica {thin[0].replica + 1}: {named}, {total}")
    if unused:
        lines += textwrap.wrap(f"without work: {', '.join(unused)}", NOTE_CHARS)
    return "\n".join(lines)


def _hex(colours: ScalarMappable, speed: float) -> str:
    from matplotlib.colors import to_hex

    return to_hex(colours.to_rgba(np.array([speed]))[0])
