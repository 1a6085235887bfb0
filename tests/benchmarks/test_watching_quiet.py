"""Nothing is re-tiled where nothing happens, whatever the seed; alarms are as rare as is stated."""

from __future__ import annotations

import numpy as np
import pytest

from tatami.retiling.noticing import Detector
from tatami.retiling.thresholds import FALSE_ALARMS
from watching import NOISES, RANKS, late_times, quiet, quiet_times, watcher


@pytest.mark.parametrize("noise", NOISES)
def test_nothing_is_moved_in_a_quiet_run_of_10_000_iterations(noise: float) -> None:
    """Through `Watcher`, its planner and prices; 20 seeds of each noise are run by `benchmarks/watching.py`."""
    _, remaps = quiet(noise, iterations=10_000, seed=0, hosts=False)
    assert remaps == 0


@pytest.mark.parametrize("seed", range(5))
def test_nor_where_links_are_watched_as_well(seed: int) -> None:
    _, remaps = quiet(0.05, iterations=400, seed=seed)
    assert remaps == 0


def test_20_quiet_runs_of_each_noise_have_no_more_alarms_than_stated() -> None:
    """20 seeds x 3 noises x 4,000 iterations side by side: 2.4 alarms are expected; 9 or more come up once in 1,000 times."""
    runs = np.stack([quiet_times(noise, iterations=4_000, seed=seed) for noise in NOISES for seed in range(20)], axis=1)
    detector = Detector(runs.shape[1:])
    alarms = sum(int(detector.step(values).any(axis=1).sum()) for values in runs)
    assert runs.shape == (4_000, 60, RANKS)
    assert pytest.approx(2.4) == FALSE_ALARMS * 240_000
    assert alarms < 9


def test_a_message_each_way_between_hosts_that_share_units_is_watched() -> None:
    watched = watcher(hosts=True)
    assert len(watched.links.messages) == RANKS
    assert late_times(watched, 0.05, iterations=3, seed=0).shape == (3, RANKS)
    assert watcher(hosts=False).links.messages == ()
