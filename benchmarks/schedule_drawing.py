"""The picture of a schedule: what every rank's vector holds at the start and after each phase, and who talked to whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tatami.collective import Phase, Role, Schedule
from tatami.collective.simulate import run_phase
from tatami.errors import InputError
from tatami.report.palette import RUST

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 32
"""More would be too small to see."""
START, DONE = np.array([0.86, 0.92, 0.84]), np.array([0.11, 0.36, 0.22])
"""Colours of an element with this rank's contribution alone, and with all ranks'."""
STALE, EDGE = "#f4f4f2", "#55554f"
BAR_WIDTH, BAR_HEIGHT = 0.72, 0.3
LINK = RUST

Contributions = npt.NDArray[np.int64]
"""(size,) of one rank's vector: bit r is set where rank r's contribution is in."""


def draw_schedule(axes: Sequence[Axes], schedule: Schedule, *, columns: int) -> None:
    """Draw the ranks in a grid, `columns` in a row, with their vectors as bars: darker the more contributions are in.

    Args:
        axes: one for the start, and one for each phase.
        schedule: of 2 to 32 ranks; some ten elements for each rank are enough.
        columns: ranks in a row: M of a torus, or the ranks of a host.

    Raises:
        InputError: too many ranks, or a number of axes that does not fit.
    """
    if not 2 <= schedule.ranks <= MOST_RANKS:
        raise InputError(f"a picture shows 2 to {MOST_RANKS} ranks, not {schedule.ranks}")
    if len(axes) != len(schedule.phases) + 1:
        raise InputError(f"{schedule.algorithm} has {len(schedule.phases)} phases, so it needs one more axes, not {len(axes)}")
    held = [np.full(schedule.size, 1 << rank, dtype=np.int64) for rank in range(schedule.ranks)]
    stale = [np.zeros(schedule.size, dtype=bool) for _ in range(schedule.ranks)]
    _draw_ranks(axes[0], held, stale, columns=columns)
    axes[0].set_title(f"start\n{schedule.ranks} ranks", fontsize=10)
    for number, (ax, phase) in enumerate(zip(axes[1:], schedule.phases, strict=True), start=1):
        run_phase(phase, held, op=np.bitwise_or)
        _mark_stale(phase, stale)
        _draw_links(ax, phase, columns=columns)
        _draw_ranks(ax, held, stale, columns=columns)
        ax.set_title(f"{number}. " + phase.title.replace(", ", "\n"), fontsize=10)
    _legend(axes[0])


def _legend(ax: Axes) -> None:
    """Below all panels: what shades and lines mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shades = {"the rank's own": START, "sums over some ranks": (START + DONE) / 2, "sums over all ranks": DONE}
    handles = [Patch(facecolor=tuple(shade), edgecolor=EDGE, label=label) for label, shade in shades.items()]
    handles.append(Patch(facecolor=STALE, edgecolor=EDGE, label="of no use any more"))
    line = Line2D([], [], color=LINK, linewidth=3, alpha=0.55, label="exchange with each other")
    ax.figure.legend(handles=[*handles, line], loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _mark_stale(phase: Phase, stale: Sequence[npt.NDArray[np.bool_]]) -> None:
    """After a reduce-scatter what is outside of a rank's own part means nothing any more, until a gather brings it."""
    for group in phase.groups:
        for member, rank in enumerate(group.ranks):
            stale[rank][group.start : group.stop] = phase.role is Role.REDUCE_SCATTER
            if phase.role is Role.REDUCE_SCATTER:
                low, high = group.part(member)
                stale[rank][low:high] = False


def _draw_ranks(ax: Axes, held: Sequence[Contributions], stale: Sequence[npt.NDArray[np.bool_]], *, columns: int) -> None:
    from matplotlib.patches import Rectangle

    ranks, size = len(held), len(held[0])
    for rank in range(ranks):
        x, y = _place(rank, columns=columns)
        for low, high in _runs(held[rank], stale[rank]):
            share = (int(held[rank][low]).bit_count() - 1) / (ranks - 1)
            colour = STALE if stale[rank][low] else tuple(START + share * (DONE - START))
            left = x + BAR_WIDTH * low / size
            ax.add_patch(Rectangle((left, y), BAR_WIDTH * (high - low) / size, BAR_HEIGHT, facecolor=colour, linewidth=0))
        ax.add_patch(Rectangle((x, y), BAR_WIDTH, BAR_HEIGHT, fill=False, edgecolor=EDGE, linewidth=0.8))
        ax.text(x, y + BAR_HEIGHT + 0.04, str(rank), ha="left", va="bottom", fontsize=8, color=EDGE)
    rows = -(-ranks // columns)
    ax.set_xlim(-0.1, columns - 1 + BAR_WIDTH + 0.1)
    ax.set_ylim(-(rows - 1) - 0.1, BAR_HEIGHT + 0.3)
    ax.set_aspect("equal")
    ax.set_axis_off()


def _draw_links(ax: Axes, phase: Phase, *, columns: int) -> None:
    """A line through the ranks of each group."""
    for group in phase.groups:
        middles = [_place(rank, columns=columns) for rank in group.ranks]
        xs = [x + BAR_WIDTH / 2 for x, _ in middles]
        ys = [y + BAR_HEIGHT / 2 for _, y in middles]
        ax.plot(xs, ys, color=LINK, linewidth=3, alpha=0.55, zorder=0, solid_capstyle="round")


def _place(rank: int, *, columns: int) -> tuple[float, float]:
    """The lower left corner of a rank's bar."""
    row, column = divmod(rank, columns)
    return float(column), -float(row)


def _runs(held: Contributions, stale: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Ranges of equal elements."""
    changes = np.flatnonzero((np.diff(held) != 0) | (np.diff(stale.astype(np.int8)) != 0)) + 1
    edges = [0, *changes.tolist(), len(held)]
    return list(pairwise(edges))
