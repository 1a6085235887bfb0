"""`tatami simulate server` and `tatami simulate platform`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simgrid_here import needs_simgrid
from tatami.cli.app import app

SMALL = ["simulate", "server", "--preset", "paper-server-10k", "--workers", "100", "--rounds", "3000"]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@needs_simgrid
def test_a_json_line_for_each_run() -> None:
    code, out, _ = run(*SMALL, "--runs", "2", "--recovery", "servers,ignore", "--sweep", "mtbf=30d,1y", "--json")
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert sorted((each["recovery"], each["seed"], each["mtbf"]) for each in records) == sorted(
        (recovery, seed, mtbf) for recovery in ("from-servers", "ignore") for seed in (0, 1) for mtbf in ("30d", "1y")
    )
    for each in records:
        assert each["rounds"] == 3000
        if each["failures"]:
            assert each["lost_per_failure_s"] == pytest.approx((each["total_s"] - each["undisturbed_s"]) / each["failures"])
        if each["recovery"] == "ignore":
            assert each["lost_updates"] == each["failures"]
    often, seldom = (sum(each["failures"] for each in records if each["mtbf"] == mtbf) for mtbf in ("30d", "1y"))
    assert often > seldom


@needs_simgrid
def test_a_table_and_a_picture(tmp_path: Path) -> None:
    code, out, _ = run(*SMALL, "--runs", "2", "--mtbf", "90d", "--plot", str(tmp_path / "bars.png"))
    assert code == 0
    for word in ("checkpoint", "from-servers", "ignore", "430,056.9 s"):
        assert word in out
    assert (tmp_path / "bars.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "bars-per-failure.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "bars.png").read_bytes() != (tmp_path / "bars-per-failure.png").read_bytes()
    (tmp_path / "bars.png").rename(tmp_path / "others.png")
    code, _, err = run(*SMALL, "--plot", str(tmp_path / "bars.png"))
    assert code == 2
    assert "--force" in err


@needs_simgrid
def test_workers_and_checkpoints_are_swept() -> None:
    arguments = [*SMALL[:4], "--rounds", "12", "--runs", "1", "--recovery", "checkpoint", "--checkpoint-waits", "--json"]
    totals_s: dict[tuple[str, str], float] = {}
    for sweep in ("workers=100,300", "every=1,4", "store=0,1,2"):
        code, out, _ = run(*arguments, "--workers", "100", "--sweep", sweep)
        assert code == 0
        name = sweep.partition("=")[0]
        totals_s |= {(name, record[name]): record["undisturbed_s"] for record in map(json.loads, out.splitlines())}
    # 13 checkpoints of 8 s in 12 rounds; every fourth round 4 of them.
    every_round_s = totals_s["every", "1"]
    assert every_round_s - totals_s["every", "4"] == pytest.approx(9 * 8.0, rel=1e-6)
    assert totals_s["workers", "100"] == totals_s["store", "0"] == every_round_s
    assert totals_s["workers", "300"] == pytest.approx(every_round_s, rel=1e-3)
    # A hundred workers behind one backbone of 5 GB/s, which is what a store's machine takes, too: some 160 s for 8 s.
    for number in ("1", "2"):
        assert totals_s["store", number] - every_round_s == pytest.approx(13 * (100 * 8e9 / (0.97 * 5e9) - 8.0), rel=0.1)


@needs_simgrid
def test_machines_of_a_cluster_file(tmp_path: Path) -> None:
    text = '[[processors]]\nname = "p"\nspeed = 2.0\nhost = "h{i}"\ncount = 4\n'
    text += '[network]\nbandwidth = "100 MB/s"\nlatency = "1 ms"\n'
    (tmp_path / "cluster.toml").write_text(text)
    arguments = ["--task", "20", "--model", "100 MB", "--rounds", "5", "--runs", "1", "--json", "--recovery", "servers"]
    code, out, _ = run("simulate", "server", "--platform", str(tmp_path / "cluster.toml"), *arguments)
    assert code == 0
    # Three workers share the one server's 100 MB/s: 3 s to pull, 10 s to compute, 3 s to push.
    assert json.loads(out)["total_s"] == pytest.approx(5 * (2 * (3 + 1e-3) + 10), rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["server", "--preset", "paper"], "there is no preset 'paper'; there are: oakforest-like, paper-server-10k"),
        (["server"], "which machines?"),
        ([*SMALL[1:], "--sweep", "luck=1,2"], "there is no 'luck' to be swept; there are: detection,"),
        ([*SMALL[1:], "--sweep", "mtbf="], "--sweep is NAME=A,B,..."),
        ([*SMALL[1:], "--sweep", "replicas=x"], "--sweep replicas=x"),
        ([*SMALL[1:], "--sweep", "workers=150"], "multiple of it, not 150"),
        ([*SMALL[1:], "--sweep", "resume=later"], "--sweep resume=later"),
        ([*SMALL[1:], "--store", "100"], "of 100 servers' machines at most 99 can be a store, not 100"),
        ([*SMALL[1:], "--recovery", "prayer"], "there is no recovery 'prayer'; there are: checkpoint, servers, ignore"),
        ([*SMALL[1:], "--mtbf", "-3d"], "must be >= 0"),
        (["server", "--preset", "oakforest-like", "--servers", "300"], "has only 256"),
        (["platform"], "which platform?"),
        (["platform", "none.toml"], "cannot read the platform file none.toml"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: list[str], words: str) -> None:
    code, out, err = run(*(arguments if arguments[0] == "simulate" else ["simulate", *arguments]))
    assert code == 2
    assert words in " ".join(err.split())
    assert out == ""


def test_a_platform_is_printed() -> None:
    code, out, _ = run("simulate", "platform", "--preset", "paper-server-10k")
    assert code == 0
    for word in ("10,100 hosts", "worker{i}", "40 Gbit/s", "cluster0/worker0"):
        assert word in out
    code, out, _ = run("simulate", "platform", "--preset", "oakforest-like", "--nodes", "8208", "--json")
    assert json.loads(out)["hosts"] == 8208


def test_without_simgrid_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    code, _, err = run(*SMALL)
    assert code == 2
    assert "pip install 'tatami[sim]'" in err
