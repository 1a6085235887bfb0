"""`tatami probe`: the table, the record, and a cluster file that `tatami plan` reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cluster import Cluster, read_cluster

SMALL = ["--backend", "threads", "--net", "20-16-5", "--samples", "64"]


def test_it_writes_a_cluster_that_plan_reads(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    result = CliRunner().invoke(app, ["probe", "-n", "3", *SMALL, "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert f"written to {file}; next: tatami plan {file} --net 20-16-5 --samples 64" in result.stdout
    cluster = read_cluster(file)
    assert [processor.name for processor in cluster.processors] == ["p0", "p1", "p2"]
    for processor in cluster.processors:
        assert processor.speed > 1e6
        assert processor.spread is not None
        assert processor.memory_bytes is not None
        assert f"{processor.name} " in result.stdout
    assert list(cluster.sample_flop) == ["20-16-5"]
    assert "a sample of 20-16-5 costs " in result.stdout
    planned = CliRunner().invoke(app, ["plan", str(file), "--planner", "weighted", "--json"])
    assert json.loads(planned.stdout)[0]["replicas"] == [["p0"], ["p1"], ["p2"]]


def test_the_record_has_speeds_and_links() -> None:
    result = CliRunner().invoke(app, ["probe", *SMALL, "--json"])
    record = json.loads(result.stdout)
    assert [processor["name"] for processor in record["processors"]] == ["p0", "p1"]
    assert record["sample_flop"]["20-16-5"] >= 0
    (link,) = record["links"]
    assert link["hosts"][0] == link["hosts"][1]
    assert link["latency_s"] >= 0
    assert link["bandwidth_bytes_per_s"] > 0


@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, ["probe", "-n", "1", *SMALL[2:]])
    assert result.exit_code == 0, result.output
    assert "assumed: one rank has no link to measure" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns


@pytest.mark.parametrize(("spread", "told"), [(0.4, False), (2.3, True)])
def test_speeds_that_strayed_are_told_and_planned_with(
    spread: float, told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = replace(Cluster.from_speeds([1e10, 2e10]), sample_flop={"20-16-5": 100.0})
    noisy = tuple(replace(each, spread=spread) for each in cluster.processors)
    monkeypatch.setattr("tatami.model.cluster_probe.probe", lambda *_, **__: replace(cluster, processors=noisy))
    file = tmp_path / "cluster.toml"
    result = CliRunner().invoke(app, ["probe", "-n", "1", *SMALL[2:], "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert ("measured speeds varied by 230 %" in result.stderr) is told
    for net in ("20-16-5", "30-8-2"):
        planned = CliRunner().invoke(app, ["plan", str(file), "--net", net, "--json"])
        assert planned.exit_code == 0, planned.stderr
        assert all(0 < each["range_s"][0] < each["predicted_s"] for each in json.loads(planned.stdout))
        measured = "the speeds in" in planned.stderr and "tatami probe --net 30-8-2 measures them" in planned.stderr
        assert measured is (net == "30-8-2")


NETWORK = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))

def sample():
    return torch.rand(2, 20)
"""


def test_a_network_in_a_file_is_what_is_timed(tmp_path: Path) -> None:
    network, file = tmp_path / "network.py", tmp_path / "cluster.toml"
    network.write_text(NETWORK)
    options = ["probe", "-n", "2", "--backend", "threads", "--samples", "256", "-o", str(file), "--force"]
    result = CliRunner().invoke(app, [*options, "--model", str(network), "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    read = read_cluster(file).processors
    for processor, told in zip(read, record["processors"], strict=True):
        points = told["speed_by_size"]
        assert float(processor.speed) == told["speed_flop_per_s"] > 0
        assert points is None or [size for size, _ in points] == sorted(size for size, _ in points)
    for text, said in (
        ("sample = 1", "does not define build_model"),
        ("sample = 1\ndef build_model(): pass", "returned NoneType"),
    ):
        network.write_text(text)
        result = CliRunner().invoke(app, [*options, "--model", str(network)])
        assert result.exit_code != 0
        assert said in result.output + str(result.exception)
