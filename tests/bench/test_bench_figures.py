"""What benchmarks say of times that are known: medians, spreads and ratios, who counts, and every parameter in the record."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tatami.bench import interleaved, train
from tatami.bench.allreduce import AllReduceBenchmark, bench_allreduce, tune
from tatami.bench.interleaved import MOST_REPEATS, Contestant, Timed, machine, measured, message_record
from tatami.bench.train import TrainBenchmark, bench_train
from tatami.collective import ALGORITHMS
from tatami.comm import AbstractCommunicator, AllReduce, AllReduceSpec, run_threads
from tatami.comm.threads import single_communicator
from tatami.comm.tuning import table_path
from tatami.errors import InputError
from tatami.report import blank, draw_bandwidth
from tatami.testing.worlds import World

MACHINE = {"cpu", "cores", "system", "python", "torch"}


class Hands(threading.local):
    """A clock for each thread, that goes on when the thread says that it works."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def sleep(self, duration_s: float) -> None:
        self.at_s += duration_s


def test_contestants_are_timed_in_turn_and_what_is_warm_up_does_not_count() -> None:
    hands, done = Hands(), list[str]()
    takes_s = {"one": iter([9.0, 1.0, 3.0, 2.0]), "other": iter([9.0, 40.0, 20.0, 30.0])}

    def contestant(name: str) -> Contestant:
        def run(times: int) -> None:
            done.append(f"{name} {times}")
            hands.sleep(next(takes_s[name]) * times)

        return run

    timed = interleaved.interleaved(
        {name: contestant(name) for name in takes_s},
        rounds=3,
        repeats={"one": 5, "other": 2},
        before=lambda: done.append("meet"),
        clock=hands,
    )
    assert done == ["meet", "one 5", "meet", "other 2"] * 4
    assert timed["one"].seconds == pytest.approx((1.0, 3.0, 2.0))
    assert timed["other"].seconds == pytest.approx((40.0, 20.0, 30.0))
    assert timed["one"].median_s == pytest.approx(2.0)
    assert timed["one"].spread == pytest.approx((3.0 - 1.0) / 2.0)


def test_each_is_run_once_before_a_timing_where_its_memory_is_to_be_warm() -> None:
    hands, repeats = Hands(), list[int]()

    def run(times: int) -> None:
        repeats.append(times)
        hands.sleep(times)

    (timed,) = interleaved.interleaved({"": run}, rounds=1, repeats=4, warm=True, clock=hands).values()
    assert repeats == [1, 4, 1, 4]
    assert timed.seconds == (1.0,)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.threads_only
def test_the_slowest_rank_counts_and_a_fast_contestant_is_repeated_more_often(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = Hands()
    monkeypatch.setattr(interleaved, "SystemClock", lambda: hands)

    def body(comm: AbstractCommunicator) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
        most = {"fast": 0, "slow": 0, "nothing": 0}

        def contestant(name: str, takes_s: float) -> Contestant:
            def run(times: int) -> None:
                most[name] = max(most[name], times)
                hands.sleep(times * takes_s * (1 + comm.rank))

            return run

        contestants = {
            "fast": contestant("fast", 0.001),
            "slow": contestant("slow", 0.1),
            "nothing": contestant("nothing", 1e-9),
        }
        return measured(contestants, comm, rounds=3, seconds=0.06), most

    for found, most in world(body):
        for name, takes_s in (("fast", 0.001), ("slow", 0.1)):
            assert found[name]["median_s"] == pytest.approx(takes_s * world.size)
            assert found[name]["mean_s"] == pytest.approx(takes_s * world.size)
            assert found[name]["spread"] == pytest.approx(0.0, abs=1e-9)
        assert most["slow"] == 1, "it takes longer than asked for at once"
        assert most["fast"] == pytest.approx(60 / world.size, abs=1)
        assert 1 < most["nothing"] <= MOST_REPEATS


def test_a_line_about_messages_has_their_number_a_second() -> None:
    record = message_record(single_communicator(), {"median_s": 0.25, "mean_s": 0.5, "spread": 2.0}, size_bytes=1000)
    assert record == {
        "ranks": 1,
        "hosts": 1,
        "size_bytes": 1000,
        "median_s": 0.25,
        "mean_s": 0.5,
        "spread": 2.0,
        "bandwidth_bytes_per_s": 4000.0,
    }


def known(seconds: Mapping[str, tuple[float, ...]]) -> Callable[..., dict[str, Timed]]:
    """In the place of `interleaved`: each contestant runs once, and took what is known."""

    def take(contestants: Mapping[str, Contestant], **_: Any) -> dict[str, Timed]:
        for run in contestants.values():
            run(1)
        return {name: Timed(seconds=seconds[name]) for name in contestants}

    return take


def test_a_step_of_training_against_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"probe": (0.1,), "tatami": (2.0, 1.0, 4.0), "tatami-trainer": (5.0, 4.0, 4.0), "plain": (1.0, 3.0, 1.0)}
    monkeypatch.setattr(train, "interleaved", known(times))
    benchmark = TrainBenchmark(net="4-6-2", batch_size=8, rounds=3, seconds=1.0)
    record = bench_train(benchmark, single_communicator())
    assert {name: record[name] for name in asdict(benchmark)} == asdict(benchmark)
    assert (record["benchmark"], record["ranks"], record["threads_per_rank"]) == ("train", 1, torch.get_num_threads())
    assert record["repeats"] == 10, "steps of 0.1 s in a second"
    assert [record[f"{name}_median_s"] for name in ("tatami", "tatami-trainer", "plain")] == [2.0, 4.0, 1.0]
    assert [record[f"{name}_spread"] for name in ("tatami", "tatami-trainer", "plain")] == [1.5, 0.25, 2.0]
    assert (record["speed_over_plain"], record["trainer_speed_over_plain"]) == (0.5, 0.25)
    assert set(record["machine"]) == MACHINE


def test_the_machine_is_named() -> None:
    assert set(machine()) == MACHINE
    assert machine()["torch"] == torch.__version__


QUICK = AllReduceBenchmark(sizes_bytes=(4096, 1024), rounds=3, seconds=0.001)
KEYS = {"benchmark", "algorithm", "ranks", "hosts", "size_bytes", "median_s", "mean_s", "spread", "bandwidth_bytes_per_s"}


def test_every_algorithm_is_measured_and_the_table_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def body(comm: AbstractCommunicator) -> list[dict[str, object]]:
        records = list(bench_allreduce(QUICK, comm))
        table, path = tune(records, comm)
        assert path == table_path(table.fingerprint)
        comm.barrier()
        assert path.is_file()
        assert [timing.size_bytes for timing in table.timings] == [1024, 4096]
        fastest = table.choose(1024, among=list(ALGORITHMS))
        assert AllReduce(comm, AllReduceSpec(size=256)).algorithm == fastest
        return records

    one, other = run_threads(body, size=2)
    assert one == other
    assert {str(record["algorithm"]) for record in one} == {"auto", *ALGORITHMS} - {"hierarchical"}
    for record in one:
        assert set(record) - {"chosen"} == KEYS
        assert isinstance(record["median_s"], float)
        assert record["bandwidth_bytes_per_s"] == pytest.approx(record["size_bytes"] / record["median_s"])  # type: ignore[operator]
    assert [record["size_bytes"] for record in one] == sorted(record["size_bytes"] for record in one)  # type: ignore[type-var]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="at least 4 bytes, one float32; not 3"):
        AllReduceBenchmark(sizes_bytes=(3,)).check()
    with pytest.raises(InputError, match="no all-reduce 'best'; choose one of: auto, mpi, gloo, native"):
        AllReduceBenchmark(algorithms=("best",)).check()


def test_the_picture_has_a_line_for_each_and_sizes_below() -> None:
    pytest.importorskip("matplotlib")
    records = [
        {"algorithm": name, "size_bytes": size, "bandwidth_bytes_per_s": 1e9}
        for name in ("shared", "mpi", "ring")
        for size in (1024, 2**20)
    ]
    _, ax = blank()
    draw_bandwidth(ax, records)
    assert [line.get_label() for line in ax.get_lines()] == ["shared", "mpi", "ring"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1 KiB", "1 MiB"]
    assert "GB/s" in ax.get_ylabel()


def tatami(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-m", "tatami", *words], capture_output=True, text=True, timeout=800, env=environ, check=False
    )


def test_the_command_prints_a_json_line_for_each_and_keeps_the_table(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    words = ("bench", "allreduce", "-n", "2", "--sizes", "1KiB", "--rounds", "2", "--seconds", "0.001", "--tune", "--json")
    done = tatami(*words, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {record["algorithm"] for record in records} >= {"auto", "mpi", "gloo", "native", "shared", "torus_put"}
    assert all((record["ranks"], record["size_bytes"]) == (2, 1024) for record in records)
    shown = tatami("tune", "--show", cache=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "auto uses" in shown.stdout
    assert "1 KiB" in shown.stdout


def test_without_a_table_the_command_says_how_to_measure_one(tmp_path: Path) -> None:
    shown = tatami("tune", "--show", cache=tmp_path)
    assert shown.returncode == 0
    assert "tatami bench allreduce -n 4 --tune" in shown.stderr
