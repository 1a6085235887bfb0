"""Benchmarks that are scripts: every contestant is measured, records fit each other, and other processes find the modules."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import bench_data_parallel
from bench_data_parallel import DataParallelBenchmark
from bench_data_parallel import bench_data_parallel as measure_data_parallel
from bench_functions import FunctionsBenchmark
from bench_put import bench_put, crossover_bytes, seconds_by_way
from elsewhere import HERE, of_ranks, python_path
from failures import RECOVERIES, PaperServer, drawn, with_interval
from piles import questions
from tatami.bench.allreduce import AllReduceBenchmark
from tatami.bench.interleaved import Contestant, Timed
from tatami.comm import run_threads
from tatami.comm.threads import single_communicator
from tatami.errors import InputError
from tatami.server.recovery import Checkpoint, FromServers
from tatami.sim.processes import Runs
from tatami.sim.server import paper_setup, simulate_server
from tatami.tiling import Plan, StagedPlan

QUICK = AllReduceBenchmark(sizes_bytes=(4096, 1024), rounds=3, seconds=0.001)
ROUND_TRIPS = """
import json, tatami
from bench_functions import FunctionsBenchmark, bench_functions
comm = tatami.init()
for record in bench_functions(FunctionsBenchmark(sizes_bytes=(8, 65536), rounds=1, seconds=0.001), comm):
    if comm.rank == 0:
        print(json.dumps(record))
"""


def test_puts_and_all_gathers_are_measured() -> None:
    records = run_threads(lambda comm: list(bench_put(QUICK, comm)), size=3)[0]
    assert {record["algorithm"] for record in records} == {"allgather", "put-fence", "put-pscw", "put-lock", "shared"}
    assert all(record["median_s"] > 0 for record in records)


def test_where_put_and_all_gather_cross() -> None:
    def records(put_s: tuple[float, ...]) -> list[dict[str, object]]:
        return [
            {"algorithm": name, "size_bytes": size, "median_s": seconds}
            for name, times in (("allgather", (1.0, 1.0, 1.0)), ("put-pscw", put_s))
            for size, seconds in zip((1024, 2048, 4096), times, strict=True)
        ]

    assert crossover_bytes(seconds_by_way(records((2.0, 0.5, 0.4))), way="put-pscw") == 2048
    assert crossover_bytes(seconds_by_way(records((0.5, 2.0, 0.4))), way="put-pscw") == 4096
    assert crossover_bytes(seconds_by_way(records((0.5, 0.5, 0.4))), way="put-pscw") == 1024
    assert crossover_bytes(seconds_by_way(records((0.5, 0.5, 1.4))), way="put-pscw") is None


def test_what_is_exposed_is_what_a_step_takes_more_than_without_communication_in_the_same_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {
        "compute": (1.0, 10.0, 2.0),
        "tatami": (1.5, 10.25, 4.0),
        "tatami-bfloat16": (1.0, 10.0, 2.0),
        "tatami-one-step-stale": (1.25, 10.25, 2.25),
        "ddp-gloo": (2.0, 11.0, 4.0),
    }

    def interleaved(contestants: Mapping[str, Contestant], **_: object) -> dict[str, Timed]:
        for run in contestants.values():
            run(1)
        return {name: Timed(seconds=times[name]) for name in contestants}

    monkeypatch.setattr(bench_data_parallel, "interleaved", interleaved)
    benchmark = DataParallelBenchmark(net="4-6-2", batch_size=8, rounds=3, repeats=1)
    records = measure_data_parallel(benchmark, single_communicator())
    assert [record["contestant"] for record in records] == list(times)
    by_name = {record["contestant"]: record for record in records}
    assert {name: each["exposed_s"] for name, each in by_name.items()} == {
        "compute": 0.0,
        "tatami": 0.5,
        "tatami-bfloat16": 0.0,
        "tatami-one-step-stale": 0.25,
        "ddp-gloo": 1.0,
    }
    assert (by_name["tatami"]["exposed_over_ddp"], by_name["tatami"]["step_over_ddp"]) == (0.5, 1.0)
    assert by_name["compute"]["step_over_ddp"] == 0.5
    for record in records:
        assert {name: record[name] for name in asdict(benchmark)} == asdict(benchmark)
        assert (record["benchmark"], record["ranks"], record["parameters"]) == ("dataparallel", 1, 4 * 6 + 6 + 6 * 2 + 2)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="between 2 ranks, not 3"):
        FunctionsBenchmark().check(ranks=3)
    with pytest.raises(InputError, match="at least 2"):
        run_threads(lambda comm: list(bench_put(QUICK, comm)), size=1)
    with pytest.raises(InputError, match="float32, of 4 bytes each; not 6"):
        FunctionsBenchmark(sizes_bytes=(6,)).check(ranks=2)


def test_round_trips_and_a_step_of_two_halves_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs the extra 'mpi'")
    script = tmp_path / "round_trips.py"
    script.write_text(ROUND_TRIPS)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TATAMI_THREADS": "1"}
    command = [sys.executable, "-m", "tatami", "run", "-n", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environ)
    assert ended.returncode == 0, ended.stderr
    *trips, step = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [record["size_bytes"] for record in trips] == [8, 65536]
    for record in trips:
        assert min(record[f"{name}_median_s"] for name in ("tatami", "mpi4py", "gloo", "autograd")) > 0
    parts_s = [step[f"{name}_median_s"] for name in ("first_half", "second_half", "messages")]
    assert step["bound_s"] == pytest.approx(sum(parts_s))


MODULES = ("paper.rank", "paper.measuring", "racing.rank", "rehearsal.rank", "rehearsal.server")


def test_another_process_finds_the_packages_from_any_folder(tmp_path: Path) -> None:
    code = f"import {', '.join(MODULES)}; print(paper.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **python_path()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == HERE / "paper" / "__init__.py"


def test_a_path_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    assert python_path() == {"PYTHONPATH": f"{HERE}{os.pathsep}/of/the/user"}
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == {"PYTHONPATH": str(HERE)}


def test_ranks_load_what_is_slow_before_their_quotas() -> None:
    assert of_ranks()["TATAMI_LAB_PRELOAD"].startswith("torch._dynamo,")
    assert of_ranks(preload=["paper.measuring"])["TATAMI_LAB_PRELOAD"].endswith(",paper.measuring")


def test_no_question_is_refused_that_has_a_way_and_no_rival_is_much_faster() -> None:
    answers = {(each.cluster, each.model): each for each in questions(("two-gaming-pcs", "cpu-and-gpu"))}
    assert len(answers) == 10
    assert all(each.holds for each in answers.values())
    refused = {key for key, each in answers.items() if each.plan is None}
    assert refused == {("two-gaming-pcs", "Llama 1.1 B"), ("two-gaming-pcs", "ResNet-50")}
    staged = answers["two-gaming-pcs", "GPT-2"]
    assert isinstance(staged.plan, StagedPlan)
    assert staged.unstaged_s is not None
    assert staged.plan.iteration_s < staged.unstaged_s, "one machine alone"
    plain = answers["cpu-and-gpu", "GPT-2"].plan
    assert isinstance(plain, Plan)
    assert {replica.processors: replica.micro_batches for replica in plain.layout.replicas} == {("cpu",): 1, ("gpu",): 7}


MONTH_S = 30 * 86400.0
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "failures.json"


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
