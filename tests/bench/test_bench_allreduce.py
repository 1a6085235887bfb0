"""The benchmarks of collectives: that they measure all there is, check it, and keep a table; and their commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tatami.bench.allreduce import AllReduceBenchmark, bench_allreduce, tune
from tatami.bench.put import bench_put, seconds_by_way
from tatami.collective import ALGORITHMS
from tatami.collective.gathering import crossover_bytes
from tatami.comm import run_threads
from tatami.comm.allreduce import AllReduce, AllReduceSpec
from tatami.comm.base import AbstractCommunicator
from tatami.comm.tuning import table_path
from tatami.errors import InputError
from tatami.report import blank, draw_bandwidth

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


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="at least 4 bytes, one float32; not 3"):
        AllReduceBenchmark(sizes_bytes=(3,)).check()
    with pytest.raises(InputError, match="no all-reduce 'best'; choose one of: auto, mpi, gloo, native"):
        AllReduceBenchmark(algorithms=("best",)).check()
    with pytest.raises(InputError, match="at least 2"):
        run_threads(lambda comm: list(bench_put(QUICK, comm)), size=1)


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
    assert "auto picks" in shown.stdout
    assert "1 KiB" in shown.stdout


def test_without_a_table_the_command_says_how_to_measure_one(tmp_path: Path) -> None:
    shown = tatami("tune", "--show", cache=tmp_path)
    assert shown.returncode == 0
    assert "tatami bench allreduce -n 4 --tune" in shown.stderr
