"""`tatami bench train`: JSON lines with every parameter and the machine, or a table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tatami.cli.app import app

SHORT = ["--batch-size", "64", "--rounds", "1", "--seconds", "0.01"]


def test_one_rank_against_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TATAMI_THREADS", "1")
    arguments = ["bench", "train", "-n", "1", "--net", "20-16-5", "--net", "20-8-5", *SHORT]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(record["net"], record["ranks"]) for record in records] == [("20-16-5", 1), ("20-8-5", 1)]
    for record in records:
        assert record["benchmark"] == "train"
        assert record["batch_size"] == 64
        assert record["threads_per_rank"] == torch.get_num_threads()
        assert set(record["machine"]) == {"cpu", "cores", "system", "python", "torch"}
        assert record["speed_over_plain"] == pytest.approx(record["plain_median_s"] / record["tatami_median_s"])
    table = CliRunner().invoke(app, arguments).stdout
    assert "20-16-5" in table
    assert "plain" in table


def test_one_rank_trains_the_models_of_tatami_train(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("TATAMI_THREADS", "1")
    arguments = [
        "bench",
        "train",
        "-n",
        "1",
        "--model",
        "gpt",
        "--model",
        "cnn",
        "--rounds",
        "1",
        "--seconds",
        "0.01",
        "--json",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(record["net"], record["batch_size"]) for record in records] == [
        ("gpt 2x48, 6 heads, 32 tokens", 16),
        ("cnn 2x16", 64),
    ]
    assert all({"tatami_spread", "tatami-trainer_spread", "plain_spread"} <= set(record) for record in records)
    assert CliRunner().invoke(app, ["bench", "train", "--model", "resnet"]).exit_code != 0


def test_two_ranks_against_distributed_data_parallel(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    done = subprocess.run(
        [sys.executable, "-m", "tatami", "bench", "train", "-n", "2", "--net", "20-16-5", *SHORT, "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    record = json.loads(line)
    assert record["ranks"] == 2
    assert record["speed_over_ddp-gloo"] > 0
    assert record["compute_speed_over_ddp-gloo"] == pytest.approx(record["ddp-gloo_median_s"] / record["compute_median_s"])
