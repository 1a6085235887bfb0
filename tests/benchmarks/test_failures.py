"""The drawn costs of failures are those of the simulator, run by run, and lie about their closed forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from failures import RECOVERIES, PaperServer, drawn, with_interval
from simgrid_here import needs_simgrid
from tatami.server.recovery import Checkpoint, FromServers
from tatami.sim.processes import Runs
from tatami.sim.server import paper_setup, simulate_server

MONTH_S = 30 * 86400.0
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "failures.json"


@needs_simgrid
def test_each_drawn_run_is_the_simulated_one() -> None:
    """100 workers that live a month, 500 rounds: 2.8 failures are expected in each run."""
    short = PaperServer(workers=100, rounds=500, mtbf_s=MONTH_S)
    base = replace(paper_setup(workers=100, rounds=500), mtbf_s=MONTH_S)
    setups = {
        "checkpoint": replace(base, recovery=Checkpoint()),
        "servers, continue": replace(base, recovery=FromServers(), resume="continue"),
        "servers, restart": replace(base, recovery=FromServers(), resume="restart"),
    }
    assert tuple(setups) == RECOVERIES
    with Runs() as runs:
        simulated = simulate_server(list(setups.values()), seeds=range(3), runs=runs)
    for recovery, found in zip(setups, simulated, strict=True):
        for run in found:
            one = drawn(short, recovery, seed=run.seed)
            assert run.num_failures == one.failures
            assert run.total_s - run.undisturbed_s == pytest.approx(one.lost_s, abs=0.01 * (1 + one.failures))


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_the_mean_of_many_is_the_closed_form(recovery: str) -> None:
    """With 40 failures a run, so that few runs are enough; within three times the 95 % interval."""
    server = PaperServer(workers=20, rounds=2000, mtbf_s=20 * 2000 * PaperServer.round_s / 40)
    assert server.expected_failures == pytest.approx(40)
    runs = [drawn(server, recovery, seed=seed) for seed in range(60)]
    mean, within = with_interval([float(run.failures) for run in runs])
    # What is done again is computed, too, in which workers die: with checkpoints half a round for each failure.
    again = {"checkpoint": 40 * 50 / (2000 * 100), "servers, restart": 50 / (2000 * 100), "servers, continue": 0.0}[recovery]
    assert mean == pytest.approx(40 * (1 + again), abs=3 * within)
    lost_s, within_s = with_interval([run.lost_s for run in runs], over=[float(run.failures) for run in runs])
    assert lost_s == pytest.approx(server.expected_s(recovery), abs=3 * within_s + 0.3)  # two in one round cost less than twice


def test_the_committed_figures_hold_the_closed_forms() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert found["seeds"] >= 1000
    for each in found["recoveries"]:
        assert each["failures_per_run"] == pytest.approx(
            each["expected_failures_per_run"], abs=2 * each["failures_per_run_within"]
        )
        assert each["lost_s_per_failure"] == pytest.approx(
            each["expected_s_per_failure"], abs=2 * each["lost_s_per_failure_within"] + 0.05
        )
