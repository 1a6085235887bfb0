"""The evaluation's facts and its arithmetic; what it measures is measured by `make bench`."""

from __future__ import annotations

import json

import pytest

from paper.breakdown import RankIteration, breakdown
from paper.setting import (
    CONDITIONS,
    DYNAMIC,
    EvaluationJob,
    SpeedChange,
    grids,
    job_from_dict,
    layout_of,
    method,
    paper_efficiency,
)
from tatami.cluster import Cluster
from tatami.errors import InputError
from tatami.tiled.phases import PhaseTimes
from tatami.workload import net_workload

WORKLOAD = net_workload("203-80-26", samples=1024)


def test_gamma_is_1_where_work_is_shared_without_loss() -> None:
    assert paper_efficiency(2.0, serial_s=[4.0, 4.0]) == 1.0
    assert paper_efficiency(1.5, serial_s=[2.0, 6.0]) == pytest.approx(1.0)
    assert paper_efficiency(3.0, serial_s=[2.0, 6.0]) == pytest.approx(0.5)


def test_a_job_is_read_as_it_was_written() -> None:
    job = EvaluationJob(
        part="courses",
        condition="B",
        num=5,
        net="203-80-26",
        samples=1024,
        contestants=("drpm", "srpm"),
        step=SpeedChange(after_iteration=60, host="h2", speed=0.3),
    )
    assert job_from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert [processor.speed for processor in job.cluster.processors] == list(CONDITIONS["B"][:5])
    assert len({processor.host for processor in job.cluster.processors}) == 5


@pytest.mark.parametrize(("num", "columns"), [(4, (1, 2, 4)), (5, (1, 5)), (6, (1, 2, 3, 6)), (7, (1, 7)), (8, (1, 2, 4, 8))])
def test_grids_have_every_number_of_columns_that_divides_n(num: int, columns: tuple[int, ...]) -> None:
    cluster = Cluster.from_speeds(CONDITIONS["A"][:num])
    names = grids(num)
    assert names == tuple(f"{name}-{count}" for name in ("even", "h-rev") for count in columns)
    for name in names:
        layout = layout_of(name, cluster=cluster, workload=WORKLOAD)
        assert f"{method(name)}-{len(layout.columns)}" == name


def test_dynamic_contestants_begin_with_what_they_know() -> None:
    cluster = Cluster.from_speeds(CONDITIONS["A"])
    for name, dynamic in DYNAMIC.items():
        known = cluster if dynamic.speeds else Cluster.from_speeds([1.0] * 8)
        planner = "timed" if "timed" in name or "notice" in name else "srpm"
        begun = layout_of(name, cluster=cluster, workload=WORKLOAD)
        assert begun == layout_of(planner, cluster=known, workload=WORKLOAD)
        assert method(name) == name


def test_contestants_that_are_none_are_refused() -> None:
    cluster = Cluster.from_speeds(CONDITIONS["A"])
    for name in ("nobody", "even-3", "ddp"):
        with pytest.raises(InputError, match=name):
            layout_of(name, cluster=cluster, workload=WORKLOAD)


def test_waiting_is_what_a_rank_has_beyond_the_last_of_its_group() -> None:
    parts = breakdown(
        [
            [_iteration(forward=3.0, vertical=4.0, horizontal=2.0, wall=10.0)],
            [_iteration(forward=6.0, vertical=1.0, horizontal=2.5, wall=10.0)],
            [_iteration(forward=8.5, vertical=0.0, horizontal=0.5, wall=10.0)],
        ],
        columns={0: 0, 1: 0, 2: 1},
    )
    first, second, third = (part.to_dict() for part in parts)
    assert first == {"compute_s": 3.0, "waiting_s": 4.5, "vertical_s": 1.0, "horizontal_s": 0.5, "overhead_s": 1.0}
    assert second == {"compute_s": 6.0, "waiting_s": 2.0, "vertical_s": 1.0, "horizontal_s": 0.5, "overhead_s": 0.5}
    assert third == {"compute_s": 8.5, "waiting_s": 0.0, "vertical_s": 0.0, "horizontal_s": 0.5, "overhead_s": 1.0}


def _iteration(*, forward: float, vertical: float, horizontal: float, wall: float) -> RankIteration:
    times = PhaseTimes(forward_s=forward, vertical_s=vertical, backward_s=0.0, horizontal_s=horizontal, update_s=0.0)
    return RankIteration(wall_s=wall, times=times)
