"""`tatami simulate`: server, platform, allreduce and tiling, with and without deaths."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.units import parse_duration

SMALL = ["simulate", "server", "--preset", "paper-server-10k", "--workers", "100", "--rounds", "3000"]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


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
        ([*SMALL[1:], "--sweep", "luck=1,2"], "'luck' cannot be swept; choose one of: detection,"),
        ([*SMALL[1:], "--sweep", "mtbf="], "--sweep is NAME=A,B,..."),
        ([*SMALL[1:], "--sweep", "mtbf=1d", "--sweep", "mtbf=2d"], "--sweep varies one option, and was given 2 times"),
        ([*SMALL[1:], "--sweep", "replicas=x"], "--sweep replicas=x"),
        ([*SMALL[1:], "--sweep", "workers=150"], "multiple of it, not 150"),
        ([*SMALL[1:], "--sweep", "resume=later"], "--sweep resume=later"),
        ([*SMALL[1:], "--store", "100"], "of 100 servers' machines at most 99 can be a store, not 100"),
        ([*SMALL[1:], "--recovery", "prayer"], "there is no recovery 'prayer'; choose one of: checkpoint, servers, ignore"),
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


BASE = ["simulate", "tiling", "--samples", "256", "--net", "64-256-8"]
DEATHS = [*BASE, "--iterations", "400", "--back", "200 ms", "--halt", "10 ms", "--restart", "100 ms", "--runs", "3"]


def test_both_answers_over_machines_and_lives_and_the_same_again() -> None:
    arguments = (*DEATHS, "--machines", "3,6", "--mtbf", "5 s,20 s", "--checkpoint-every", "50", "--json")
    code, out, err = run(*arguments)
    assert code == 0, err
    found = {(each["machines"], each["mtbf_s"], each["policy"]): each for each in map(json.loads, out.splitlines())}
    assert set(found) == {(n, s, policy) for n in (3, 6) for s in (5.0, 20.0) for policy in ("repair", "restart")}
    for each in found.values():
        assert [one["seed"] for one in each["runs"]] == [0, 1, 2]
        assert [one["steps"] for one in each["runs"]] == [400, 400, 400]
        for one in each["runs"]:
            parts = ("useful_s", "redone_s", "stopped_s", "moved_s", "saved_s")
            assert one["total_s"] == pytest.approx(sum(one[part] for part in parts))
    assert sum(one["deaths"] for one in found[6, 5.0, "repair"]["runs"]) > 0
    assert found[6, 5.0, "repair"]["lost_fraction"] < found[6, 5.0, "restart"]["lost_fraction"]
    assert run(*arguments)[1] == out


def test_machines_that_compute_a_gpt_die() -> None:
    gpt = ["--model", "gpt", "--layers", "4", "--width", "64", "--heads", "4", "--tokens", "32", "--vocabulary", "600"]
    lives = ["--speeds", "1e11,1e11,5e10,2e10", "--mtbf", "20s", "--iterations", "1000", "--samples", "16"]
    code, _, err = run("simulate", "tiling", *gpt, *lives)
    assert code == 0, err


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "lost.png"
    code, out, err = run(*DEATHS, "--speeds", "1,1,0.5", "--mtbf", "5 s", "--plot", str(picture))
    assert code == 0, err
    assert "400 iterations, means of 3 runs" in out
    assert "restart" in out
    assert "0 of 3" in out
    assert picture.stat().st_size > 1000


def test_runs_that_end_early_say_why() -> None:
    code, out, _ = run(*BASE, "--machines", "2", "--mtbf", "10 ms", "--runs", "1", "--iterations", "1000")
    assert code == 0
    assert "1 of 1" in out
    assert "no rank is left" in out
    assert "no machine is left" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machines", "8"], "--machines is for runs whose machines die: also give --mtbf"),
        (["--speeds", "1,1", "--checkpoint-every", "5"], "--checkpoint-every is for runs whose machines die"),
        (["--mtbf", "1d"], "which machines?"),
        (["--mtbf", "1d", "--machines", "8", "--speeds", "1,1"], "which machines?"),
        (["--mtbf", "1d", "--machines", "8,x"], "--machines is N,M,..."),
        (["--mtbf", "1d", "--machines", "0"], "--machines is N,M,..."),
        (["--mtbf", "often", "--machines", "8"], "--mtbf"),
        (["--mtbf", "0", "--machines", "8"], "mtbf_s must be a finite number > 0"),
        (["--mtbf", "1d", "--machines", "8", "--retile"], "--retile is not simulated together with --mtbf"),
        (["--mtbf", "1d", "--machines", "8", "--planner", "even,srpm"], "give one planner"),
        (["--mtbf", "1d", "--machines", "8", "--planner", "even", "--planner", "srpm"], "give one planner"),
        (["--mtbf", "1d", "--machines", "8", "--copies", "3"], "copies must be 1 or 2"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    code, out, err = run(*BASE, *arguments)
    assert code == 2
    assert said in " ".join(err.split())
    assert out == ""


ALLREDUCE = ["simulate", "allreduce", "--preset", "oakforest-like", "--nodes", "8"]
TILING = ["simulate", "tiling", "--speeds", "1,1,0.5,0.25"]


def records(*arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_all_reduces_over_grids_and_a_sweep() -> None:
    found = records(
        *ALLREDUCE, "--sizes", "1 MB", "--algorithms", "ring,torus_put", "--grids", "all", "--sweep", "latency=250ns,1us"
    )
    by_case = {(each["latency"], each["algorithm"], tuple(each["grid"] or ())): each["total_s"] for each in found}
    assert set(by_case) == {
        (latency, *case)
        for latency in ("250ns", "1us")
        for case in (("ring", ()), ("torus_put", (2, 4)), ("torus_put", (4, 2)))
    }
    # All eight nodes are on one switch: 14 hops of two cables.
    for latency, latency_s in (("250ns", 250e-9), ("1us", 1e-6)):
        assert by_case[latency, "ring", ()] == pytest.approx(14 * (2 * latency_s + 1e6 / 8 / 12.5e9), rel=1e-6)
        assert by_case[latency, "torus_put", (2, 4)] < by_case[latency, "ring", ()]


def test_the_table_and_the_picture_of_all_reduces(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = run(*ALLREDUCE, "--sizes", "1 MB,4 MB", "--plot", str(tmp_path / "sizes.png"))
    assert code == 0
    assert "simulated all-reduce of 8 ranks, and its speed over native\n" in out
    assert "1.00 x" in out
    assert (tmp_path / "sizes.png").stat().st_size > 1000


def test_an_all_reduce_that_would_take_hours_is_refused_with_its_transfers() -> None:
    for nodes, algorithm, transfers in (("9000", "direct", "161,982,000"), ("200000", "ring", "2,800,000")):
        code, out, err = run(*ALLREDUCE[:4], "--nodes", nodes, "--algorithms", algorithm)
        assert (code, out) == (2, "")
        asked = f"an all-reduce of {int(nodes):,} ranks by {algorithm} takes about {transfers} transfers"
        assert f"{asked}, and at most 1,000,000 are simulated" in err


def test_a_tiled_run_that_is_laid_anew() -> None:
    (found,) = records(*TILING, "--slow", "p0:3@iteration:30", "--retile", "--every", "20", "--iterations", "80")
    assert [each["kind"] for each in found["decisions"]] == ["keep", "re-map whole", "keep", "keep"]
    assert [each["iteration"] for each in found["decisions"]] == [20, 40, 60, 80]
    assert found["iterations"] == 80
    assert found["last_s"] > found["first_s"]


def test_planners_side_by_side_and_swept() -> None:
    asked = (*TILING, "--iterations", "2", "--sweep", "samples=512,1024")
    found = records(*asked, "--planner", "even,srpm")
    times = {each["planner"]: each["total_s"] for each in found}
    assert {each["planner"]: each["total_s"] for each in records(*asked, "--planner", "even", "--planner", "srpm")} == times
    assert times["srpm, samples 512"] < times["even, samples 512"] < times["even, samples 1024"]
    code, out, _ = run(*TILING, "--iterations", "2")
    assert code == 0
    assert "203-80-26, 4 processors" in out
    assert "without them" not in out


def test_what_those_without_work_cost_is_said(tmp_path: Path) -> None:
    """The other machine of `tatami plan` is not started; that of the simulation is, and hears gradients over a slow link."""
    file = tmp_path / "two.toml"
    machine = '[[processors]]\nname = "{0}"\nspeed = {1}\nlink = "50 Mbit/s"\n'
    file.write_text(machine.format("fast", 60e9) + machine.format("old", 1e6))
    gpt = ["--model", "gpt", "--layers", "1", "--width", "32", "--heads", "2", "--tokens", "8", "--vocabulary", "90"]
    (found,) = records("simulate", "tiling", str(file), *gpt, "--samples", "8")
    assert found["processors"] == ["fast"]
    out = " ".join(run("simulate", "tiling", str(file), *gpt, "--samples", "8")[1].split())
    assert "fast has work; the others are in the run, too, and hear the gradients" in out
    said = re.search(r"Started without them, an iteration is predicted to take ([\d.]+ \w+)", out)
    assert said is not None
    alone_s = parse_duration(said[1])
    planned = json.loads(run("plan", str(file), *gpt, "--samples", "8", "--planner", "timed", "--json")[1])[0]
    assert alone_s == pytest.approx(planned["predicted_s"], rel=1e-3)
    assert found["first_s"] > 1.5 * alone_s
    answer = " ".join(run("plan", str(file), *gpt, "--samples", "8")[1].split())
    assert re.search(
        r"Without work: old .* Start the run without it: as a rank without work it hears .* an iteration takes [\d.]+ ms\.",
        answer,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*ALLREDUCE, "--algorithms", "tree"], "no all-reduce 'tree'; choose one of: native, ring"),
        ([*ALLREDUCE, "--algorithms", "torus", "--grids", "3x3"], "what fits: 1x8, 2x4, 4x2, 8x1"),
        ([*ALLREDUCE, "--algorithms", "torus", "--grids", "big"], "--grids is all, or MxN"),
        ([*ALLREDUCE, "--sweep", "colour=1,2"], "'colour' cannot be swept; choose one of: latency, message, native"),
        ([*ALLREDUCE, "--sweep", "sync=never"], "--sweep sync=never"),
        ([*ALLREDUCE, "--native", "cray"], "no rule 'cray'"),
        ([*ALLREDUCE, "-n", "9"], "for 9 ranks, but oakforest-like has 8 hosts"),
        (["simulate", "allreduce", "--preset", "earth"], "no preset 'earth'; there are: oakforest-like"),
        (["simulate", "tiling"], "which machines?"),
        ([*TILING, "--slow", "p0:3"], "TIME: p0:3@2s; not 'p0:3' (a part of it is missing)"),
        ([*TILING, "--slow", "p9:2@1s"], "no processor 'p9'"),
        ([*TILING, "--planner", "best"], "no planner 'best'"),
        ([*TILING, "--mtbf", "2s", "--update", "3"], "--update must be a fraction of an iteration from 0 to below 1, not 3"),
        ([*TILING, "--retile", "--sweep", "every=often"], "--sweep every=often"),
        ([*TILING, "--sweep", "every=5,10"], "--every is for runs that re-tile: also give --retile"),
        ([*TILING, "--every", "5"], "--every is for runs that re-tile: also give --retile"),
        ([*TILING, "--retile", "--stages", "2", "--model", "gpt", "--sweep", "every=5"], "leave out --every"),
        ([*TILING, "--sweep", "samples=8", "--sweep", "iterations=2"], "given 2 times: samples=8, iterations=2; give it once"),
        ([*ALLREDUCE, "--sweep", "put=0s", "--sweep", "nodes=2"], "given 2 times: put=0s, nodes=2; give it once"),
        ([*ALLREDUCE, "-n", "1"], "an all-reduce of 1 rank sends nothing: simulate at least 2 nodes"),
        ([*ALLREDUCE, "--sweep", "nodes=1,2"], "an all-reduce of 1 rank sends nothing: simulate at least 2 nodes"),
    ],
)
def test_bad_input_of_all_reduces_and_tilings(arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert said in err.replace("\n", " ")
    assert out == ""


def test_a_slowdown_after_the_last_iteration_is_told() -> None:
    code, _, err = run(*TILING, "--slow", "p0:3@iteration:11", "--iterations", "10")
    assert code == 0
    assert "p0: --slow begins after the last of 10 iterations" in err
    code, _, err = run(*TILING, "--slow", "p0:3@2h", "--iterations", "10")
    assert code == 0
    assert "p0: --slow begins after 2 h, and the run ends after" in err.replace("\n", " ")
    assert "--slow begins" not in run(*TILING, "--slow", "p0:3@iteration:10", "--iterations", "10")[2]
