"""What `benchmarks/bench_server.py` says: rounds beside copies, and beside loops; its figures must fit each other."""

import statistics
from typing import Any

import pytest

pytest.importorskip("ray")

import bench_server_loops
from bench_server import MB, ServerBenchmark, bench_round
from bench_server_loops import bench_throughput
from tatami.errors import InputError


def test_rounds_are_held_against_the_copies_they_need() -> None:
    found: dict[str, Any] = bench_round(ServerBenchmark(size_bytes=4 * MB, workers=2, servers=2, rounds=4, blocks=2))
    assert found["copies_bytes"] == {
        "gradients into shared memory": 8 * MB,
        "gradients read and summed": 8 * MB,
        "parameters into shared memory": 4 * MB,
        "parameters into the models": 8 * MB,
    }
    assert [len(block) for block in found["round_s"]] == [2, 2]
    first, second, third = found["copy_bytes_per_s"]
    bare_s = [28 * MB * 2 / (first + second), 28 * MB * 2 / (second + third)]
    assert found["bare_copies_s"] == pytest.approx(statistics.median(bare_s))
    ratios = [statistics.median(block) / bare for block, bare in zip(found["round_s"], bare_s, strict=True)]
    assert found["round_over_bare_copies"] == pytest.approx(statistics.median(ratios))
    assert found["start_to_first_round_s"] > 0


def test_rounds_of_training_are_held_against_loops_of_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(bench_server_loops, "_LEAST_COMPUTE_S", 1e-4)
    monkeypatch.setattr(bench_server_loops, "_TIMES", (1, 2))
    found = list(bench_throughput(steps=2, blocks=2, workers=2))
    assert [each["samples_per_worker"] for each in found] == [2048, 4096]
    for each in found:
        pairs = list(zip(each["loop_step_each_s"], each["bsp_round_each_s"], strict=True))
        assert len(pairs) == 2
        assert each["bsp_over_loops"] == pytest.approx(statistics.median(loop / bsp for loop, bsp in pairs))


def test_what_would_measure_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="rounds must be at least 3"):
        ServerBenchmark(rounds=2)
    with pytest.raises(InputError, match="blocks must be at least 1, not 0"):
        ServerBenchmark(blocks=0)
