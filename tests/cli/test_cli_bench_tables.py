"""What the benchmarks' commands show of measurements that are known: tables for people, a JSON line each for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tatami.cli import ranks as cli_ranks
from tatami.cli.app import app
from tatami.comm import AbstractCommunicator, run_threads

SECONDS = {"allgather": (1e-3, 2e-3), "put-fence": (2e-3, 3e-3), "put-pscw": (2e-3, 1e-3), "put-lock": (5e-4, 1e-3)}


@pytest.fixture(autouse=True)
def _on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ranks(body: Callable[[AbstractCommunicator], object], *, ranks: int, backend: str, hosts: str | None) -> object:
        assert (backend, hosts) == ("mpi", None)
        return run_threads(body, size=ranks)[0]

    monkeypatch.setattr(cli_ranks, "on_ranks", on_ranks)
    monkeypatch.setenv("TATAMI_THREADS", "1")


def gathered() -> list[dict[str, Any]]:
    """Records as those of `bench_put`, of 1 and 2 KiB."""
    return [
        {
            "algorithm": name,
            "size_bytes": size_bytes,
            "median_s": seconds[index],
            "spread": 0.5,
            "bandwidth_bytes_per_s": size_bytes / seconds[index],
        }
        for index, size_bytes in enumerate((1024, 2048))
        for name, seconds in SECONDS.items()
    ]


def bench_put(benchmark: Any, comm: AbstractCommunicator) -> Iterator[dict[str, Any]]:
    assert (benchmark.sizes_bytes, benchmark.rounds, benchmark.seconds, comm.size) == ((1024, 2048), 4, 0.25, 3)
    yield from gathered()


def test_where_puts_and_all_gather_cross(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("tatami.bench.put.bench_put", bench_put)
    words = ["bench", "put-vs-allgather", "-n", "3", "--sizes", "1KiB,2KiB", "--rounds", "4", "--seconds", "0.25"]
    shown = CliRunner().invoke(app, [*words, "--plot", str(tmp_path / "put.png")])
    assert shown.exit_code == 0, shown.output
    assert "gathering, 3 ranks" in shown.stdout
    assert "put-fence beats all-gather: nowhere here\n" in shown.stdout
    assert "put-pscw beats all-gather: from 2 KiB on\n" in shown.stdout
    assert "put-lock beats all-gather: from 1 KiB on\n" in shown.stdout
    assert "0.5 ms ±50%" in shown.stdout or "500 us ±50%" in shown.stdout
    assert (tmp_path / "put.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in CliRunner().invoke(app, [*words, "--json"]).stdout.splitlines()]
    assert lines == gathered()


def steps(benchmark: Any, comm: AbstractCommunicator) -> list[dict[str, Any]]:
    """As `bench_data_parallel`."""
    common = {
        "ranks": comm.size,
        "net": benchmark.net,
        "batch_size": benchmark.batch_size,
        "rounds": benchmark.rounds,
        "parameters": 1_500_000,
    }
    return [
        {**common, "contestant": name, "step_s": step_s, "exposed_s": exposed_s, "exposed_over_ddp": exposed_s / 0.004}
        for name, step_s, exposed_s in (("compute", 0.02, 0.0), ("tatami", 0.021, 0.001), ("ddp-gloo", 0.024, 0.004))
    ]


def test_what_communication_a_data_parallel_step_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tatami.bench.data_parallel.bench_data_parallel", steps)
    words = ["bench", "dataparallel", "-n", "2", "--net", "8-8-2", "--batch-size", "16", "--rounds", "3"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "a step on 2 ranks, 16 samples each; medians of 3" in shown.stdout
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["1.5", "M", "compute", "20", "ms"] in lines
    assert ["1.5", "M", "tatami", "21", "ms", "1", "ms", "0.25"] in lines
    assert ["1.5", "M", "ddp-gloo", "24", "ms", "4", "ms", "1.00"] in lines
    told = [json.loads(line) for line in CliRunner().invoke(app, [*words, "--json"]).stdout.splitlines()]
    assert [(record["contestant"], record["net"]) for record in told] == [
        ("compute", "8-8-2"),
        ("tatami", "8-8-2"),
        ("ddp-gloo", "8-8-2"),
    ]


def test_rounds_of_the_server_beside_copies_and_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    asked: list[Any] = []

    def moved(benchmark: Any) -> dict[str, Any]:
        asked.append((benchmark.size_bytes, benchmark.workers, benchmark.servers, benchmark.rounds, benchmark.blocks))
        return {
            "round_median_s": 0.2,
            "bare_copies_s": 0.1,
            "round_over_bare_copies": 2.0,
            "start_to_first_round_s": 3.0,
        }

    def trained(**options: int) -> Iterator[dict[str, Any]]:
        asked.append(options)
        yield {"workers": 2, "samples_per_worker": 512, "bsp_round_s": 0.05, "loop_step_s": 0.04, "bsp_over_loops": 0.8}

    monkeypatch.setattr("tatami.bench.server.bench_round", moved)
    monkeypatch.setattr("tatami.bench.server_loops.bench_throughput", trained)
    words = ["bench", "server", "--megabytes", "20", "--workers", "3", "--servers", "2", "--rounds", "5", "--blocks", "2"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert asked == [(20_000_000, 3, 2, 5, 2), {"steps": 10, "blocks": 2}]
    for said in (
        "a round of 20 MB, 3 workers, 2 servers",
        "2.00 times as long",
        "2 workers of 512 samples",
        "0.80 of its speed",
    ):
        assert said in shown.stdout
    assert len(CliRunner().invoke(app, [*words, "--json"]).stdout.splitlines()) == 2
