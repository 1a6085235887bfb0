"""Random histories of deaths, silences, joins, departures and broken links: no hang, no rank a step apart, no row out of date.

`make chaos` runs 100,000 of them.
"""

from __future__ import annotations

import os
from collections import Counter

from membership_world import World

RUNS = int(os.environ.get("TATAMI_MEMBERSHIP_CHAOS_RUNS", "400"))
SEED = int(os.environ.get("TATAMI_CHAOS_SEED", "0"))


def test_every_history_ends_with_the_right_rows_or_a_named_stop() -> None:
    ends = Counter(World(SEED * 10_000_000 + run).run() for run in range(RUNS))
    assert ends[None] > RUNS / 3
