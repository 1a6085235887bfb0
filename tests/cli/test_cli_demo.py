"""`tatami demo`: three runs over slowed ranks, with equal losses, as one real MPI job."""

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from tatami.cli.demo import why_slower
from tatami.cli.training import TrainingOutcome, course
from tatami.retiling import Decision, DecisionKind
from tatami.tiling import Layout, Span, Tile, Tiling
from tatami.train import Check, History

TILING = Tiling(samples=4, units=4, tiles=(Tile(processor="p0", replica=0, samples=Span(0, 4), units=Span(0, 4)),))


def test_three_ways_to_one_loss(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, "-m", "tatami", "demo", "--speeds", "1,0.5", "--net", "64-200-10", "--iterations", "40", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [record["method"] for record in records] == ["even", "srpm", "drpm"]
    even, srpm, drpm = records
    for record in records:  # an efficiency that cannot be is told as such, and is no figure
        assert record["efficiency"] is None or 0 < record["efficiency"] <= 1.02
        assert record["efficiency"] is not None or "cannot be" in record["efficiency_problem"]
    assert srpm["loss"] == pytest.approx(even["loss"], rel=1e-4)
    assert drpm["loss"] == pytest.approx(even["loss"], rel=1e-4)
    assert even["accuracy"]["digit"] > 0.5
    assert srpm["speeds"] == {"p0": 1.0, "p1": 0.5}
    assert [check["iteration"] for check in drpm["checks"]] == [20, 40]
    assert all(record["is_machine_busy"] in (True, False) for record in records)
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["course.png", "tiling.png"]


def test_the_course_of_a_run_is_cut_at_its_checks_or_into_equal_parts() -> None:
    history = History(losses=[1.0] * 25, iteration_s=[9.0, *[1.0] * 9, *[2.0] * 10, *[3.0] * 5])
    points = course(history, every=10)
    assert [(p.iteration, p.iteration_s, p.remapping) for p in points] == [(10, 1.0, None), (20, 2.0, None), (25, 3.0, None)]
    history = History(losses=[1.0] * 30, iteration_s=[9.0] * 10 + [2.0] * 10 + [1.0] * 10, checks=[check(20, moves=True)])
    points = course(history, every=10)
    assert [(p.iteration, p.iteration_s, p.remapping) for p in points] == [(10, 9.0, None), (20, 2.0, "whole"), (30, 1.0, None)]


def check(iteration: int, *, moves: bool) -> Check:
    kind = DecisionKind.WHOLE if moves else DecisionKind.KEEP
    decision = Decision(
        kind=kind, check=1, iteration=iteration, layout=cast(Layout, None), tiling=TILING, speeds={"p0": 1.0, "p1": 0.5},
        ratio=None, predicted=1.0, reason="even enough",
    )  # fmt: skip
    return Check(decision=decision, compute_s={"p0": 1.0, "p1": 2.0}, moved=None)


def outcome(iteration_s: float, *, checks: list[Check], speeds: dict[str, float]) -> TrainingOutcome:
    return TrainingOutcome(
        history=History(losses=[1.0], iteration_s=[iteration_s], checks=checks),
        loss=1.0,
        accuracy={},
        first=TILING,
        tiling=TILING,
        speeds=speeds,
        iteration_s=iteration_s,
        batch_size=4,
    )


def test_drpm_that_is_slower_than_equal_tiles_is_explained() -> None:
    told = {"p0": 1.0, "p1": 0.5}
    even = outcome(1.0, checks=[], speeds=told)

    def why(iteration_s: float, *, checks: list[Check], speeds: dict[str, float], is_busy: bool = False) -> str:
        return why_slower(outcome(iteration_s, checks=checks, speeds=speeds), even, told=told, is_busy=is_busy) or ""

    assert why(0.9, checks=[], speeds=told) == ""
    assert "DRPM is 1.50 times as slow as equal tiles here: it never moved a tile (there were too few" in why(
        1.5, checks=[], speeds=told
    )
    assert "(even enough)" in why(1.5, checks=[check(20, moves=False)], speeds=told)
    moved = [check(20, moves=True), check(40, moves=False)]
    wrong = {"p0": 1.0, "p1": 1.0}
    assert "took p1 for 2.00 times as fast as it is, beside the fastest; it probably measured" in why(
        1.5, checks=moved, speeds=wrong
    )
    assert "other programs" in why(1.5, checks=moved, speeds=wrong, is_busy=True)
    assert "last after iteration 20" in why(1.5, checks=moved, speeds=told)
