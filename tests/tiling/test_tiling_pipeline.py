"""Stages for unequal machines, compared with all possible ones."""

import itertools
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.tiling.pipeline import EXACT, PipelineStage, PipelineTask, best_pipeline

_LARGEST_REGRET = 0.15


def _task(seed: int, *, machines: int, pieces: int, limited: bool) -> PipelineTask:
    """Speeds and pieces within a factor of ten, links within four decades."""
    rng = np.random.default_rng(seed)
    work = 10 ** rng.uniform(0, 1, pieces)
    own = 10 ** rng.uniform(-1, 3, machines)
    return PipelineTask(
        work_s=work[None] / 10 ** rng.uniform(0, 1, machines)[:, None],
        step_s=rng.uniform(0, 0.1, machines),
        crossing_bytes=rng.choice([1.0, 1.0, 3.0, 2.0], pieces) * rng.uniform(0.5, 20),
        bandwidth_bytes_per_s=np.minimum(own[:, None], own[None]),
        latency_s=np.full((machines, machines), rng.choice([0.0, 0.1])),
        state_bytes=work,
        activation_bytes=work * 0.2,
        memory_bytes=rng.uniform(0.2, 1.5, machines) * work.sum() if limited else np.full(machines, math.inf),
        micro_batches=int(rng.choice([1, 2, 4, 8, 16])),
    )


def _least_s(task: PipelineTask) -> float:
    """Of all orders of all subsets of the machines, and all cuts."""
    least_s = math.inf
    for count in range(1, min(task.num_machines, task.num_pieces) + 1):
        orders = np.array(list(itertools.permutations(range(task.num_machines), count)))
        for cuts in itertools.combinations(range(1, task.num_pieces), count - 1):
            edges = np.tile([0, *cuts, task.num_pieces], (len(orders), 1))
            least_s = min(least_s, float(task.times_s(orders, edges).min()))
    return least_s


def _kept_bytes(task: PipelineTask, stages: Sequence[PipelineStage], index: int) -> float:
    pieces = slice(stages[index].first, stages[index].stop)
    in_flight = min(len(stages) - index, task.micro_batches)
    return float(task.state_bytes[pieces].sum() + in_flight * task.activation_bytes[pieces].sum())


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), machines=st.integers(2, 6), pieces=st.integers(3, 7), limited=st.booleans())
def test_little_is_lost_against_all_pipelines(seed: int, machines: int, pieces: int, limited: bool) -> None:
    task = _task(seed, machines=machines, pieces=pieces, limited=limited)
    least_s = _least_s(task)
    found = best_pipeline(task)
    if found is None:
        assert math.isinf(least_s)
        return
    assert found[0].first == 0
    assert found[-1].stop == task.num_pieces
    assert all(one.stop == other.first for one, other in pairwise(found))
    assert len({stage.machine for stage in found}) == len(found)
    for index, stage in enumerate(found):
        assert _kept_bytes(task, found, index) <= task.memory_bytes[stage.machine] * (1 + 1e-12)
    assert least_s * (1 - 1e-12) <= task.time_s(found) <= least_s * (1 + _LARGEST_REGRET)


@pytest.mark.parametrize("machines", [EXACT, 40])
def test_no_single_machine_is_faster_and_memory_is_kept(machines: int) -> None:
    for seed in range(3):
        task = _task(seed, machines=machines, pieces=60, limited=seed == 2)
        found = best_pipeline(task)
        assert found is not None
        assert math.isfinite(task.time_s(found))
        alone_s = min(task.time_s((PipelineStage(machine=each, first=0, stop=task.num_pieces),)) for each in range(machines))
        assert task.time_s(found) <= alone_s


def test_two_equal_machines_share_a_network_where_the_link_is_thin_but_not_where_it_is_thinner() -> None:
    def task(bandwidth_bytes_per_s: float) -> PipelineTask:
        return PipelineTask(
            work_s=np.ones((2, 4)),
            step_s=np.zeros(2),
            crossing_bytes=np.array([0.0, 10.0, 1.0, 10.0]),
            bandwidth_bytes_per_s=np.full((2, 2), bandwidth_bytes_per_s),
            latency_s=np.zeros((2, 2)),
            state_bytes=np.zeros(4),
            activation_bytes=np.zeros(4),
            memory_bytes=np.full(2, math.inf),
            micro_batches=10,
        )

    found = best_pipeline(task(1.0))
    assert found is not None
    assert [(stage.first, stage.stop) for stage in found] == [(0, 2), (2, 4)]
    # Filling: 2 + 2 for computing, 1 in each direction; then nine micro-batches more, of 2 each.
    assert task(1.0).time_s(found) == pytest.approx(4 + 2 + 9 * 2)
    alone = best_pipeline(task(0.1))
    assert alone is not None
    assert len(alone) == 1
    assert task(0.1).time_s(alone) == pytest.approx(40)
