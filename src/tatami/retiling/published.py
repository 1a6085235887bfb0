"""DRPM as published: Ozawa, Sugaya and Aso, section 5.

* A run that started with no abilities: its first check re-maps the whole.
* t1_min / t1_max < T_whole: the whole is re-mapped (SRPM again), by abilities from t2.
* t1_min / t1_max < T_line: the replicas are, by abilities from t1, so that they reflect communication too.
* Otherwise nothing is done.

Times are means over the last L iterations; an ability is the slope of the line through the last L points (time, work done).

t1 contains the wait for the slowest of the replica, which makes the members of a replica look alike, and no cut inside a
replica removes an imbalance between replicas. So this rule may do too little (a rank 1.5 times too slow in its replica may
give a ratio of 0.8) or too much (re-map replicas at every check, forever, with nothing gained). `tatami.retiling.settling`
does neither.
"""

from __future__ import annotations

from tatami.retiling.decision import DecisionKind, Verdict
from tatami.retiling.situation import Situation


def published(situation: Situation) -> Verdict:
    """What the published rule does."""
    retiler = situation.retiler
    seen = situation.balance("t1_s", window=situation.recent)
    ratio = None if seen is None else seen.ratio
    from_t2 = situation.speeds("t2_s", window=situation.recent)
    if situation.first:
        told = "first check without known speeds" + ("" if ratio is None else f", t1 min/max {ratio:.2f}")
        return Verdict(kind=DecisionKind.WHOLE, why=told, layout=situation.whole(from_t2), speeds=from_t2, ratio=ratio)
    if ratio is None:
        return Verdict(kind=DecisionKind.KEEP, why="t1 is 0 everywhere", layout=situation.layout, speeds=from_t2, ratio=None)
    if ratio < retiler.t_whole:
        why = f"t1 min/max {ratio:.2f} < {retiler.t_whole:.2f}"
        return Verdict(kind=DecisionKind.WHOLE, why=why, layout=situation.whole(from_t2), speeds=from_t2, ratio=ratio)
    if ratio < retiler.t_line:
        from_t1 = situation.speeds("t1_s", window=situation.recent)
        why = f"t1 min/max {ratio:.2f} < {retiler.t_line:.2f}"
        return Verdict(kind=DecisionKind.REPLICAS, why=why, layout=situation.replicas(from_t1), speeds=from_t1, ratio=ratio)
    why = f"t1 min/max {ratio:.2f} >= {retiler.t_line:.2f}"
    return Verdict(kind=DecisionKind.KEEP, why=why, layout=situation.layout, speeds=from_t2, ratio=ratio)
