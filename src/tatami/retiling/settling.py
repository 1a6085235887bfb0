"""DRPM so that it settles: the published rule (Ozawa, Sugaya and Aso, section 5) with four changes.

1. *Pure compute time* takes the place of t1 and t2, in the ratio and in the abilities. t1 contains the wait for the slowest of
   the replica, which hides an imbalance inside it.
2. *Beyond the noise.* The ratio plus `certainty` times its standard error must be below the threshold too. The error comes from
   the scatter of the same L points. Where they do not suffice, those of up to the last `MEMORY` windows since the last
   re-mapping are taken together. A rank that changed its speed in the middle of a window scatters widely, so the rule waits
   for a clean one.
3. *Only what helps.* Replicas are re-mapped only where that is expected to lift the ratio to `t_line`, and the whole otherwise:
   an imbalance between replicas cannot be removed inside them. Neither is done unless it is expected to shorten the longest
   compute time by `min_gain`; that also ends a search which whole units and samples cannot take further. So one slow rank
   of many is always relieved, while one that became faster is not given more where all together would hardly notice.
4. *Patience.* Two re-mappings in a row settle a run. If they did not, the forecast was wrong (times that do not grow with the
   area, ranks that share a core), and each further one must promise twice the gain of the one before, up to `HIGHEST_BAR`,
   until a check finds the balance good.

The first check of a run without known speeds takes 1 - `min_gain` for both thresholds: it re-maps the whole unless that gains
less than `min_gain`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tatami.retiling.ability import Balance
from tatami.retiling.decision import DecisionKind, Verdict
from tatami.retiling.situation import Situation
from tatami.tiling import Layout

MEMORY = 8
"""Windows that are taken together against noise: almost three times as sharp as one."""
QUICK = 2
"""Re-mappings in a row before the forecast is distrusted; the paper needs one or two."""
HIGHEST_BAR = 0.4
"""No more gain than this is ever asked for: a rank that becomes slower by 3 always passes."""


def settling(situation: Situation) -> Verdict:
    """What the settling rule does."""
    retiler = situation.retiler
    window = situation.recent
    seen = situation.balance("compute_s", window=window)
    if seen is None:
        speeds = situation.speeds("compute_s", window=window)
        return Verdict(kind=DecisionKind.KEEP, why="no rank computed", layout=situation.layout, speeds=speeds, ratio=None)
    line = 1 - retiler.min_gain if situation.first else retiler.t_line
    sure = _sure(seen, line, retiler.certainty)
    if seen.ratio < line and not sure:
        together = situation.balance("compute_s", window=situation.kept)
        if together is not None and _sure(together, line, retiler.certainty):
            window, seen, sure = situation.kept, together, True
    speeds = situation.speeds("compute_s", window=window)

    def keep(why: str, *, settled: bool) -> Verdict:
        return Verdict(
            kind=DecisionKind.KEEP, why=why, layout=situation.layout, speeds=speeds, ratio=seen.ratio, settled=settled
        )

    if seen.ratio >= line:
        return keep(f"compute min/max {seen.ratio:.2f} >= {line:.2f}", settled=True)
    below = f"compute min/max {seen.ratio:.2f} < {line:.2f}"
    if not sure:
        return keep(f"{below}, but the noise is {retiler.certainty:g} x {seen.error:.2f}", settled=True)
    whole_only = situation.first or seen.ratio < retiler.t_whole
    # With a `min_gain` of 0.05, the first two re-mappings in a row must gain 0.05 each, the third 0.1, the fourth 0.2, and all
    # that follow 0.4.
    bar = max(retiler.min_gain, min(HIGHEST_BAR, retiler.min_gain * 2 ** max(0, situation.streak - QUICK + 1)))
    kind, layout, gain = _choose(situation, speeds, whole_only=whole_only, bar=bar)
    if gain < bar:
        return keep(
            f"{below}, but to {kind.value} would shorten the longest by {max(0.0, gain):.0%} only, less than {bar:.0%}",
            settled=False,
        )
    if situation.first:
        below = f"first check without known speeds, {below}"
    elif seen.ratio < retiler.t_whole:
        below = f"compute min/max {seen.ratio:.2f} < {retiler.t_whole:.2f}"
    elif kind is DecisionKind.WHOLE:
        below = f"{below}, which cuts inside the replicas cannot remove"
    return Verdict(kind=kind, why=below, layout=layout, speeds=speeds, ratio=seen.ratio)


def _sure(seen: Balance, line: float, certainty: float) -> bool:
    # A ratio of 0.75 that is known to 3 % may as well be 0.82: with 3 standard errors it is not surely below a line of 0.8.
    return seen.ratio * (1 + certainty * seen.error) < line


def _choose(
    situation: Situation, speeds: Mapping[str, float], *, whole_only: bool, bar: float
) -> tuple[DecisionKind, Layout, float]:
    """The replicas where they suffice, otherwise what is expected to be faster; with its gain."""
    now = situation.forecast(situation.layout, speeds).slowest
    replicas = situation.replicas(speeds)
    lines = situation.forecast(replicas, speeds)
    lines_gain = 1 - lines.slowest / now
    if not whole_only and lines.ratio >= situation.retiler.t_line and lines_gain >= bar:
        return DecisionKind.REPLICAS, replicas, lines_gain
    whole = situation.whole(speeds)
    whole_gain = 1 - situation.forecast(whole, speeds).slowest / now
    if whole_gain >= lines_gain:
        return DecisionKind.WHOLE, whole, whole_gain
    return DecisionKind.REPLICAS, replicas, lines_gain
