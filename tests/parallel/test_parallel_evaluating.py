"""Evaluation, observation and early stopping of many ranks: exact for uneven ranks, alike on all, and no hang."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tatami.comm import AbstractCommunicator
from tatami.comm.launch import find_launcher, launch_command
from tatami.errors import InputError, TrainingError
from tatami.parallel import (
    EarlyStopping,
    Measured,
    MultiNodeEvaluator,
    ObservationAggregator,
    gather_evaluation,
    weighted_means,
)


def values_of(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize("counts", [(3, 5, 2, 7), (0, 4, 0, 1), (4, 4, 4, 4), (0, 0, 0, 0)])
def test_means_are_over_the_samples_of_all_ranks(comm: AbstractCommunicator, counts: tuple[int, ...]) -> None:
    whole = torch.cat([values_of(rank, counts[rank]) for rank in range(comm.size)])
    mine = values_of(comm.rank, counts[comm.rank])  # the mean of none is NaN, and does not count

    def evaluate() -> Measured:
        return Measured(values={"b": mine.mean().item(), "a": mine.square().mean().item()}, num_samples=len(mine))

    means = MultiNodeEvaluator(evaluate, comm)()
    if len(whole) == 0:
        assert means == {}
    else:
        expected = {"a": whole.square().mean().item(), "b": whole.mean().item()}
        assert list(means) == ["a", "b"]
        assert means == pytest.approx(expected, rel=1e-12)


def test_names_that_only_some_ranks_have(comm: AbstractCommunicator) -> None:
    values = {"all": float(comm.rank), f"only {comm.rank}": 5.0 + comm.rank}
    if comm.rank % 2:
        values["odd"] = comm.rank
    means = weighted_means(Measured(values=values, num_samples=comm.rank + 1), comm)
    expected = {f"only {rank}": 5.0 + rank for rank in range(comm.size)}
    for name, ranks in (("all", range(comm.size)), ("odd", range(1, comm.size, 2))):
        if ranks:
            expected[name] = sum(rank * (rank + 1) for rank in ranks) / sum(rank + 1 for rank in ranks)
    assert means == pytest.approx(expected, rel=1e-15)


def test_an_evaluation_that_fails_on_one_rank_fails_on_all(comm: AbstractCommunicator) -> None:
    last = comm.size - 1

    def evaluate() -> Measured:
        if comm.rank == last:
            raise KeyError("accuracy")
        return Measured(values={}, num_samples=1)

    with pytest.raises(TrainingError, match=f"the evaluation failed on rank {last} of {comm.size}: KeyError: 'accuracy'"):
        MultiNodeEvaluator(evaluate, comm)()
    with pytest.raises(InputError, match="rank 0 measured -1 samples"):
        weighted_means(Measured(values={}, num_samples=-1), comm)
    with pytest.raises(InputError, match=r"rank 0 measured loss as a Tensor; give a number, as by \.item\(\)"):
        weighted_means(Measured(values={"loss": torch.ones(1)}, num_samples=1), comm)  # type: ignore[dict-item]


@pytest.mark.parametrize(("length", "batch_size"), [(97, 7), (9, 77), (0, 3)])
def test_results_of_all_batches_come_in_turn(comm: AbstractCommunicator, length: int, batch_size: int) -> None:
    """97 items in batches of 7, and 9 in batches of 77: strided over the ranks, of which some have fewer batches, or none."""

    def batches_of(rank: int) -> list[list[int]]:
        mine = list(range(length))[rank :: comm.size]
        return [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]

    everyones = [[[rank, *batch] for batch in batches_of(rank)] for rank in range(comm.size)]
    longest = max(map(len, everyones))
    expected = [results[index] for index in range(longest) for results in everyones if index < len(results)]
    found = gather_evaluation(
        batches_of(comm.rank), comm, local=lambda batch: [comm.rank, *batch], aggregate=lambda results: results
    )
    assert found == expected


def test_ranks_with_many_more_batches_than_others(comm: AbstractCommunicator) -> None:
    def twice(batch: int) -> int:
        return 2 * batch

    def total(results: list[int]) -> int:
        return sum(results)

    assert gather_evaluation([1] * (20 * comm.rank), comm, local=twice, aggregate=total) == 2 * sum(
        20 * rank for rank in range(comm.size)
    )


@pytest.mark.parametrize("where", ["local", "aggregate"])
def test_a_gathered_evaluation_that_fails_fails_on_all_ranks(comm: AbstractCommunicator, where: str) -> None:
    def local(batch: int) -> float:
        return 1 / batch if where == "local" and comm.rank == comm.size - 1 else 1.0

    def aggregate(results: list[float]) -> float:
        return results[len(results)]

    what = f"the evaluation failed on rank {comm.size - 1}" if where == "local" else "aggregate failed on rank 0"
    with pytest.raises(TrainingError, match=what):
        gather_evaluation([1, 0], comm, local=local, aggregate=aggregate)


# -- observations --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_observations_become_the_mean_of_all_ranks(comm: AbstractCommunicator, every: int) -> None:
    observations = ObservationAggregator(comm, every=every)
    for step in range(1, 7):
        seen = observations.observe({"rank": comm.rank, "step": step})
        if step % every:
            assert seen is None
        else:
            assert seen == {"rank": (comm.size - 1) / 2, "step": step - (every - 1) / 2}


def test_observations_weigh_by_samples_and_may_have_names_of_their_own(comm: AbstractCommunicator) -> None:
    observations, ranks = ObservationAggregator(comm, every=2), range(comm.size)
    assert observations.observe({"x": comm.rank, f"rank {comm.rank}": 1.0}, num_samples=comm.rank) is None
    expected = {f"rank {rank}": 1.0 for rank in ranks if rank}
    expected["x"] = (sum(rank * rank for rank in ranks) + 10.0 * comm.size) / (sum(ranks) + comm.size)
    assert observations.observe({"x": 10.0}, num_samples=1) == pytest.approx(expected, rel=1e-15)


def test_observations_may_be_aggregated_in_another_way(comm: AbstractCommunicator) -> None:
    def largest(values: Sequence[Sequence[float]]) -> float:
        assert [len(each) for each in values] == [2] * comm.size
        return max(map(max, values))

    observations = ObservationAggregator(comm, every=2, aggregate=largest)
    observations.observe({"x": comm.rank})
    assert observations.observe({"x": -1.0}) == {"x": comm.size - 1}
    broken = ObservationAggregator(comm, aggregate=lambda values: values[len(values)][0])
    with pytest.raises(TrainingError, match=r"aggregate failed on (rank 0 of 1|every rank): IndexError"):
        broken.observe({"x": 1.0})
    with pytest.raises(InputError, match="every must be at least 1, not 0"):
        ObservationAggregator(comm, every=0)


# -- early stopping ------------------------------------------------------------------------------------------------------------


def test_all_ranks_stop_together_at_the_references_check(comm: AbstractCommunicator) -> None:
    """The reference's sequence: with a patience of 3 it first fires at check 7 of 8, and then again."""
    accuracies = [0.5, 0.5, 0.6, 0.7, 0.6, 0.4, 0.3, 0.2]
    stopping = EarlyStopping(comm, patience=3, mode="max")
    # Every rank has values of its own, of which only the mean has this course.
    assert [stopping.check(accuracy + 0.1 * (comm.rank - (comm.size - 1) / 2)) for accuracy in accuracies] == [False] * 6 + [
        True
    ] * 2


def test_losses_stop_when_they_no_longer_fall_by_enough(comm: AbstractCommunicator) -> None:
    stopping = EarlyStopping(comm, patience=2, min_delta=0.1)
    assert [stopping.check(value) for value in (1.0, 0.95, 0.85, 0.8, math.nan)] == [False, False, False, False, True]
    assert (stopping.best, stopping.num_bad) == (0.85, 2)
    other = EarlyStopping(comm, patience=3, min_delta=0.1)
    other.load_state_dict(stopping.state_dict())
    assert other.check(0.8)
    assert not other.check(0.7)


@pytest.mark.ranks(2, 3)
def test_ranks_without_samples_do_not_count(comm: AbstractCommunicator) -> None:
    stopping = EarlyStopping(comm, patience=1)
    assert not stopping.check(math.nan if comm.rank else 3.0, num_samples=0 if comm.rank else 2)
    assert stopping.best == 3.0
    assert stopping.check(0.0, num_samples=0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("options", "message"), [({"patience": 0}, "at least 1, not 0"), ({"mode": "up"}, "'max', not 'up'")])
def test_options_of_early_stopping(comm: AbstractCommunicator, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EarlyStopping(comm, **options)


# -- exceptions ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["main", "thread"])
def test_an_exception_ends_all_ranks_also_where_the_program_started_mpi_itself(tmp_path: Path, where: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "from mpi4py import MPI\n"
        "import threading, time\n"
        "from tatami.parallel import add_exception_hook\n"
        "add_exception_hook()\n"
        "def fail():\n"
        "    raise ZeroDivisionError('on purpose')\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        f"    fail() if {where!r} == 'main' else threading.Thread(target=fail, name='loader').start()\n"
        "time.sleep(1000)\n",
        encoding="utf-8",
    )
    command = launch_command(find_launcher(), [sys.executable, str(script)], ranks=2, hosts=None)
    environ = {**os.environ, "UCX_LOG_LEVEL": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environ)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "rank 1 of 2 failed" + (" in thread 'loader'" if where == "thread" else "") + "; all ranks are stopped" in said
    assert "[rank 1 of 2] ZeroDivisionError: on purpose" in said
