"""What benchmarks say of times that are known: medians, spreads and ratios, who counts, and every parameter in the record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tatami.bench import data_parallel, interleaved, train
from tatami.bench.data_parallel import DataParallelBenchmark, bench_data_parallel
from tatami.bench.interleaved import MOST_REPEATS, Contestant, Timed, machine, measured, message_record
from tatami.bench.train import TrainBenchmark, bench_train
from tatami.comm import AbstractCommunicator
from tatami.comm.threads import single_communicator
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
    monkeypatch.setattr(data_parallel, "interleaved", known(times))
    benchmark = DataParallelBenchmark(net="4-6-2", batch_size=8, rounds=3, repeats=1)
    records = bench_data_parallel(benchmark, single_communicator())
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
        assert set(record["machine"]) == MACHINE


def test_the_machine_is_named() -> None:
    assert set(machine()) == MACHINE
    assert machine()["torch"] == torch.__version__
