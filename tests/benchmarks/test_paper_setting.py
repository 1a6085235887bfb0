"""The paper's evaluation: its facts, its arithmetic, its tables and pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evaluation
from paper.breakdown import RankIteration, breakdown
from paper.pictures import draw_breakdown, draw_courses, draw_efficiency, draw_model, draw_rivals
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
from paper.tables import breakdown_table, course_table, efficiency_table, measured, model_table, predicted, rivals_table
from tatami.cluster import Cluster
from tatami.errors import InputError
from tatami.report import blank
from tatami.runtime.phases import PhaseTimes
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


@pytest.mark.parametrize(("num", "replicas"), [(4, (1, 2, 4)), (5, (1, 5)), (6, (1, 2, 3, 6)), (7, (1, 7)), (8, (1, 2, 4, 8))])
def test_grids_have_every_number_of_replicas_that_divides_n(num: int, replicas: tuple[int, ...]) -> None:
    cluster = Cluster.from_speeds(CONDITIONS["A"][:num])
    names = grids(num)
    assert names == tuple(f"{name}-{count}" for name in ("even", "h", "h-rev") for count in replicas)
    for name in names:
        layout = layout_of(name, cluster=cluster, workload=WORKLOAD)
        assert f"{method(name)}-{len(layout.replicas)}" == name


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
            [_iteration(forward=3.0, inside=4.0, across=2.0, wall=10.0)],
            [_iteration(forward=6.0, inside=1.0, across=2.5, wall=10.0)],
            [_iteration(forward=8.5, inside=0.0, across=0.5, wall=10.0)],
        ],
        replicas={0: 0, 1: 0, 2: 1},
    )
    first, second, third = (part.to_dict() for part in parts)
    assert first == {"compute_s": 3.0, "waiting_s": 4.5, "tensor_parallel_s": 1.0, "gradients_s": 0.5, "overhead_s": 1.0}
    assert second == {"compute_s": 6.0, "waiting_s": 2.0, "tensor_parallel_s": 1.0, "gradients_s": 0.5, "overhead_s": 0.5}
    assert third == {"compute_s": 8.5, "waiting_s": 0.0, "tensor_parallel_s": 0.0, "gradients_s": 0.5, "overhead_s": 1.0}


def _iteration(*, forward: float, inside: float, across: float, wall: float) -> RankIteration:
    times = PhaseTimes(forward_s=forward, tensor_parallel_s=inside, backward_s=0.0, gradients_s=across, update_s=0.0)
    return RankIteration(wall_s=wall, times=times)


NET = "203-800-26"


def _record(contestant: str, **values: Any) -> dict[str, Any]:
    return {
        "record": "iteration",
        "part": "efficiency",
        "condition": "A",
        "num": 4,
        "net": NET,
        "samples": 8192,
        "bandwidth_bytes_per_s": 125e6,
        "contestant": contestant,
        "method": contestant,
        **values,
    }


def _tiled(contestant: str, iteration_s: float, **values: Any) -> dict[str, Any]:
    parts = {f"{part}_s": iteration_s / 5 for part in ("compute", "waiting", "tensor_parallel", "gradients", "overhead")}
    return _record(
        contestant,
        **{
            "iteration_s": iteration_s,
            "efficiency": 0.09 / iteration_s,
            "predicted_s": 0.09,
            "replicas": [2, 2],
            "remapped_while_measured": 0,
            "breakdown": parts,
            **values,
        },
    )


RECORDS = [
    _tiled("even-1", 0.3, method="even"),
    _tiled("even-2", 0.2, method="even"),
    _tiled("srpm", 0.1),
    _tiled("srpm", 0.12, num=5),
    _tiled("drpm", 0.1, remapped_while_measured=1, efficiency_spread=0.04, computing=0.88),
    _tiled("srpm", 0.1, part="rivals"),
    _record("ddp", part="rivals", iteration_s=0.25, efficiency=0.4),
    {
        **_record("drpm", part="courses", record="course"),
        "iteration_s": [0.2] * 20 + [0.1] * 20,
        "total_s": 6.0,
        "efficiency_before": 0.9,
        "step": {"after_iteration": 30, "host": "h4", "speed": 0.4},
        "checks": [
            {"iteration": 20, "kind": "re-map whole", "ratio": 0.3, "reason": "..."},
            {"iteration": 40, "kind": "keep", "ratio": 0.9, "reason": "..."},
        ],
    },
]


def test_of_the_grids_of_a_method_the_fastest_counts() -> None:
    found = measured(RECORDS, part="efficiency", num=4)
    assert [each["contestant"] for each in found] == ["even-2", "srpm", "drpm"]


def test_tables_say_what_was_measured() -> None:
    gamma = efficiency_table(RECORDS, condition="A", net=NET)
    assert gamma.headers == ("method", "N = 4", "N = 5")
    assert gamma.rows == (("even", "0.45", "-"), ("SRPM", "0.90", "0.75"), ("DRPM", "0.90 ±0.04 (0.88)", "-"))
    parts = breakdown_table(RECORDS, condition="A", net=NET, num=4)
    assert parts.rows[1] == ("SRPM", "2+2", "100 ms", "20 ms", "20 ms", "20 ms", "20 ms", "20 ms")
    rivals = rivals_table(RECORDS)
    assert rivals.rows[0] == ("1 Gbit/s", "SRPM", "10.00", "2.50 x", "-", "-")
    assert course_table(RECORDS).rows == (("drpm", "20 (whole)", "100 ms", "0.90", "100 ms", "6 s"),)


def test_predictions_are_judged_where_the_tiling_stayed() -> None:
    assert [each["contestant"] for each in predicted(RECORDS)] == ["even-1", "even-2", "srpm", "srpm", "srpm"]
    rows = {row[1]: row[2:] for row in model_table(RECORDS).rows}
    assert rows["SRPM"] == ("3", "10.0 %", "-10.0 %", "-25.0 %")


def test_pictures_hold_what_the_records_hold() -> None:
    pytest.importorskip("matplotlib")
    _, ax = blank()
    draw_efficiency(ax, RECORDS, condition="A", net=NET)
    assert [line.get_label() for line in ax.get_lines()][:3] == ["even", "SRPM", "DRPM"]
    assert np.asarray(ax.get_lines()[1].get_ydata()).tolist() == pytest.approx([0.9, 0.75])
    _, ax = blank()
    draw_breakdown(ax, RECORDS, condition="A", net=NET, num=4)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["even", "SRPM", "DRPM"]
    assert len(ax.patches) == 3 * 5
    _, ax = blank()
    draw_courses(ax, RECORDS, contestants=("drpm", "L 3"), labels=("DRPM", "L = 3"))
    assert np.asarray(ax.get_lines()[0].get_xdata()).tolist() == [0, 5, 10, 15, 20, 25, 30, 35, 40]  # from the first on
    _, ax = blank()
    draw_rivals(ax, RECORDS)
    assert {label.get_text() for label in ax.texts} == {"4.0", "10.0"}
    _, ax = blank()
    draw_model(ax, RECORDS)
    assert ax.get_xscale() == "log"
    legend = ax.get_legend()
    assert legend is not None
    assert {label.get_text() for label in legend.get_texts()} == {"even", "SRPM"}


def test_the_committed_document_is_what_the_committed_records_give(tmp_path: Path) -> None:
    evaluation.write_tables(evaluation.read(evaluation.RESULTS / "evaluation.jsonl"), tmp_path / "evaluation.md")
    assert (tmp_path / "evaluation.md").read_text() == (evaluation.RESULTS / "evaluation.md").read_text()
