"""`tatami demo`: three runs over slowed ranks, with equal losses, as one real MPI job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tatami.cli.training import course
from tatami.tiled import History


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
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["course.png", "tiling.png"]


def test_the_course_of_a_run_without_checks_is_cut_into_equal_parts() -> None:
    history = History(losses=[1.0] * 25, iteration_s=[9.0, *[1.0] * 9, *[2.0] * 10, *[3.0] * 5])
    points = course(history, every=10)
    assert [(point.iteration, point.iteration_s, point.remapping) for point in points] == [
        (10, 1.0, None),
        (20, 2.0, None),
        (25, 3.0, None),
    ]
