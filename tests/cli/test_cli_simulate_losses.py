"""`tatami simulate tiling --mtbf`: deaths and joins, repaired and restarted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app

BASE = ["simulate", "tiling", "--samples", "256", "--net", "64-256-8"]
DEATHS = [*BASE, "--iterations", "400", "--back", "200 ms", "--halt", "10 ms", "--restart", "100 ms", "--runs", "3"]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


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
        (["--machines", "8"], "--machines is for runs whose machines die: give --mtbf too"),
        (["--speeds", "1,1", "--checkpoint-every", "5"], "--checkpoint-every is for runs whose machines die"),
        (["--mtbf", "1d"], "which machines?"),
        (["--mtbf", "1d", "--machines", "8", "--speeds", "1,1"], "which machines?"),
        (["--mtbf", "1d", "--machines", "8,x"], "--machines is N,M,..."),
        (["--mtbf", "1d", "--machines", "0"], "--machines is N,M,..."),
        (["--mtbf", "often", "--machines", "8"], "--mtbf"),
        (["--mtbf", "0", "--machines", "8"], "mtbf_s must be a finite number > 0"),
        (["--mtbf", "1d", "--machines", "8", "--retile"], "--retile is not simulated together with --mtbf"),
        (["--mtbf", "1d", "--machines", "8", "--planner", "even,srpm"], "give one planner"),
        (["--mtbf", "1d", "--machines", "8", "--copies", "3"], "copies must be 1 or 2"),
        (["--mtbf", "1d", "--machines", "8,300"], "more than the 256 samples"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    code, out, err = run(*BASE, *arguments)
    assert code == 2
    assert said in " ".join(err.split())
    assert out == ""
