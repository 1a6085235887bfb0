"""The detection benchmark looks at many runs side by side, where a run has a `Watcher`: both raise the same alarms."""

from __future__ import annotations

import numpy as np
import pytest

import detection
from detection import RANKS, alarms_of, draw, times_of
from watching import watcher


@pytest.mark.parametrize("kind", ["50 %", "drift"])
def test_a_watcher_raises_the_alarms_that_are_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "ITERATIONS", 1000)
    rng = np.random.default_rng(0)
    times = times_of(draw(0.05, kind, runs=3, rng=rng), rng)
    counted = alarms_of("notice", times)
    assert counted.any()
    for run in range(3):
        watched = watcher(hosts=False)
        watched.moved(1e12)  # so that no tiles move, which the benchmark accounts for by itself
        for iteration, values in enumerate(times[:, run], start=1):
            watched.take(iteration, values)
        raised = {(alarm.iteration - 1, int(alarm.processor[1:])) for alarm in watched.alarms}
        assert raised == {(int(at), int(rank)) for at, rank in np.argwhere(counted[:, run])}
        assert counted.shape[2] == RANKS
