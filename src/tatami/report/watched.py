"""The picture of a run that was watched: speeds as estimated, alarms, what was lost against prices, and what was decided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tatami.report.palette import LINES, OCHRE, RANKS, RUST
from tatami.retiling import Alarm, Decision, DecisionKind, Glance

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Mapping[DecisionKind, str] = {
    DecisionKind.SAMPLES: LINES[1],
    DecisionKind.REPLICAS: OCHRE,
    DecisionKind.WHOLE: RUST,
    DecisionKind.LEAVE: LINES[2],
}


def draw_watched(
    ax: Axes,
    below: Axes,
    *,
    names: Sequence[str],
    glances: Sequence[Glance],
    alarms: Sequence[Alarm],
    decisions: Sequence[Decision],
    iterations: int,
) -> Axes:
    """Draw speeds in `ax`, relative to what was first known of each, and in `below` what was lost over the price of moving.

    A move is made before that exceeds 1, or at once where more was lost until the change was noticed. Speeds that never
    varied by 10 % are grey.

    Args:
        ax, below: empty ones that share their iterations.
        names: of the processors, in the order of the cluster.
        glances, alarms: of the `Watcher`.
        decisions: its decisions.
        iterations: of the run.
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for rank, name in enumerate(names):
        known = [(glance.iteration, glance.speeds[rank]) for glance in glances if math.isfinite(glance.speeds[rank])]
        if not known:
            continue
        at, speeds = zip(*known, strict=True)
        shares = [speed / speeds[0] for speed in speeds]
        calm = max(abs(share - 1.0) for share in shares) < 0.1
        style: dict[str, Any] = (
            {"color": "0.7", "linewidth": 1.0, "zorder": 1}
            if calm
            else {"color": RANKS[rank % len(RANKS)], "linewidth": 1.8, "label": name}
        )
        ax.step([*at, iterations], [*shares, shares[-1]], where="post", **style)
    top = 1.0
    for alarm in alarms:
        if alarm.link is not None:
            below.axvline(alarm.iteration, color="0.5", linewidth=1.0, linestyle=":")
            below.annotate(f"{' - '.join(alarm.link)}: {alarm.slower:.1f} x", (alarm.iteration, 1.0), fontsize=8)
            continue
        rank = names.index(alarm.processor)
        share = next((g.speeds[rank] for g in glances if g.iteration >= alarm.iteration), math.nan)
        first = next((g.speeds[rank] for g in glances if math.isfinite(g.speeds[rank])), math.nan)
        ax.plot([alarm.iteration], [share / first], "v" if alarm.slower > 1 else "^", color="black", markersize=6, zorder=4)
        top = max(top, share / first if math.isfinite(share / first) else 1.0)
    told = set[DecisionKind]()
    for decision in decisions:
        if decision.remaps:
            label = decision.kind.value if decision.kind not in told else None
            told.add(decision.kind)
            for each, named in ((ax, label), (below, None)):
                each.axvline(
                    decision.iteration, color=COLOURS.get(decision.kind, "0.3"), linewidth=1.4, linestyle="--", label=named
                )
    for kind, colour in COLOURS.items():
        listed = [(glance.iteration, _share(glance, kind)) for glance in glances]
        if any(math.isfinite(share) for _, share in listed):
            below.plot(*zip(*listed, strict=True), color=colour, linewidth=1.6, marker="o", markersize=4)
    below.axhline(1.0, color="0.2", linewidth=1.0, linestyle=":")
    below.set_yscale("log")
    low, high = below.get_ylim()
    below.set_ylim(min(low, 0.1), max(high, 10.0))
    below.set_ylabel("lost / price of moving")
    below.set_xlabel("iteration")
    below.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    below.grid(axis="y", alpha=0.25)
    ax.set_xlim(0, iterations)
    ax.set_ylim(0, 1.12 * max(top, ax.get_ylim()[1] / 1.12))
    ax.set_ylabel("speed, of what it was")
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    ax.grid(axis="y", alpha=0.25)
    if alarms:
        ax.plot([], [], "v", color="black", label="alarm: slower")
        ax.plot([], [], "^", color="black", label="alarm: faster")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return ax


def _share(glance: Glance, kind: DecisionKind) -> float:
    """What was lost, of the price; NaN where this could not be moved to, or where moving is free."""
    price_s = glance.price_s.get(kind, 0.0)
    return glance.loss_s[kind] / price_s if price_s > 0 else math.nan
