"""`tatami simulate allreduce` and `tatami simulate tiling`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simgrid_here import needs_simgrid
from tatami.cli.app import app

ALLREDUCE = ["simulate", "allreduce", "--preset", "oakforest-like", "--nodes", "8"]
TILING = ["simulate", "tiling", "--speeds", "1,1,0.5,0.25"]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def records(*arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


@needs_simgrid
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


@needs_simgrid
def test_the_table_and_the_picture_of_all_reduces(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = run(*ALLREDUCE, "--sizes", "1 MB,4 MB", "--plot", str(tmp_path / "sizes.png"))
    assert code == 0
    assert "simulated all-reduce of 8 ranks" in out
    assert "1.00 x" in out
    assert (tmp_path / "sizes.png").stat().st_size > 1000


@needs_simgrid
def test_a_tiled_run_that_is_laid_anew() -> None:
    (found,) = records(*TILING, "--slow", "p0:3@iteration:30", "--retile", "--every", "20", "--iterations", "80")
    assert [each["kind"] for each in found["decisions"]] == ["keep", "re-map whole", "keep", "keep"]
    assert [each["iteration"] for each in found["decisions"]] == [20, 40, 60, 80]
    assert found["iterations"] == 80
    assert found["last_s"] > found["first_s"]


@needs_simgrid
def test_planners_side_by_side_and_swept() -> None:
    found = records(*TILING, "--planner", "even,srpm", "--iterations", "2", "--sweep", "samples=512,1024")
    times = {each["planner"]: each["total_s"] for each in found}
    assert times["srpm, samples 512"] < times["even, samples 512"] < times["even, samples 1024"]
    code, out, _ = run(*TILING, "--iterations", "2")
    assert code == 0
    assert "203-80-26, 4 processors" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*ALLREDUCE, "--algorithms", "tree"], "no all-reduce 'tree'; choose one of: native, ring"),
        ([*ALLREDUCE, "--algorithms", "torus", "--grids", "3x3"], "what fits: 1x8, 2x4, 4x2, 8x1"),
        ([*ALLREDUCE, "--algorithms", "torus", "--grids", "big"], "--grids is all, or MxN"),
        ([*ALLREDUCE, "--sweep", "colour=1,2"], "no 'colour' to be swept; there are: latency, message, native"),
        ([*ALLREDUCE, "--sweep", "sync=never"], "--sweep sync=never"),
        ([*ALLREDUCE, "--native", "cray"], "no rule 'cray'"),
        ([*ALLREDUCE, "-n", "9"], "for 9 ranks, but oakforest-like has 8 hosts"),
        (["simulate", "allreduce", "--preset", "earth"], "no preset 'earth'; there are: oakforest-like"),
        (["simulate", "tiling"], "which machines?"),
        ([*TILING, "--slow", "p0"], "--slow is NAME:FACTOR@iteration:N"),
        ([*TILING, "--slow", "p9:2@1s"], "no processor 'p9'"),
        ([*TILING, "--planner", "best"], "no planner 'best'"),
        ([*TILING, "--mtbf", "2s", "--update", "3"], "--update must be a share of an iteration from 0 to below 1, not 3"),
        ([*TILING, "--sweep", "every=often"], "--sweep every=often"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert said in err.replace("\n", " ")
    assert out == ""


def test_a_slowdown_after_the_last_iteration_is_told() -> None:
    code, _, err = run(*TILING, "--slow", "p0:3@iteration:11", "--iterations", "10")
    assert code == 0
    assert "p0: --slow begins after the last of 10 iterations" in err
    assert "--slow begins" not in run(*TILING, "--slow", "p0:3@iteration:10", "--iterations", "10")[2]
