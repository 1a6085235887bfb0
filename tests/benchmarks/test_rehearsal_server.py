"""What rounds of the parameter server are held against: constants from transfers of one object, and the rounds they give."""

from __future__ import annotations

import json

import pytest

from rehearsal.server import FLOAT_BYTES, ServerJob, server_job_from_dict, setup_of
from simgrid_here import needs_simgrid
from tatami.sim.processes import Runs
from tatami.sim.server import simulate_server

JOB = ServerJob(bandwidth_bytes_per_s=12.5e6, transfer_s=0.4, task_s=1.0)
MODEL_BYTES = 5e6
FOUND = {
    "transfers": [
        {"size_bytes": 1e6, "seconds": [0.11, 0.11, 9.0]},
        {"size_bytes": 5e6, "seconds": [0.51, 0.2, 0.51]},
    ]
}
"""10 MB/s, and 10 ms for whatever size."""
RATE, LATENCY_S = 1e7, 0.01


def test_a_job_comes_back_from_json() -> None:
    assert server_job_from_dict(json.loads(json.dumps(JOB.to_dict()))) == JOB


def test_a_job_has_a_model_that_takes_so_long_and_a_host_more_than_workers() -> None:
    assert JOB.elements * FLOAT_BYTES == MODEL_BYTES
    assert len(JOB.cluster.processors) == 4
    assert JOB.cluster.network.bandwidth_bytes_per_s == 12.5e6


def test_constants_are_those_of_one_transfer_and_of_a_tiny_model() -> None:
    setup = setup_of(FOUND, {"workers": [1, 2], "servers": [0], "tiny_s": [1.02, 1.02, 7.0]}, JOB)
    assert setup.platform.cluster.network.bandwidth_bytes_per_s == pytest.approx(RATE)  # type: ignore[attr-defined]
    assert setup.platform.cluster.network.latency_s == pytest.approx(LATENCY_S)  # type: ignore[attr-defined]
    assert setup.apply_s == pytest.approx(0.02)
    assert setup.model_bytes == MODEL_BYTES
    assert (setup.workers, setup.servers) == ((1, 2), (0,))


@needs_simgrid
@pytest.mark.parametrize(
    ("workers", "servers", "transfer_s"),
    [
        ([1], [0], MODEL_BYTES / RATE),
        ([1, 2], [0], 2 * MODEL_BYTES / RATE),  # both over the server's link
        ([2, 3], [0, 1], MODEL_BYTES / RATE),  # half of the model from each server, to two workers
    ],
)
def test_a_simulated_round_is_what_its_links_take(workers: list[int], servers: list[int], transfer_s: float) -> None:
    setup = setup_of(FOUND, {"workers": workers, "servers": servers, "tiny_s": [1.02]}, JOB)
    with Runs(cores=1) as runs:
        ((run,),) = simulate_server([setup], seeds=[0], runs=runs)
    assert run.undisturbed_s / run.rounds == pytest.approx(2 * (LATENCY_S + transfer_s) + 1.0 + 0.02, rel=1e-6)
