"""Traces of slowdowns for the lab, and the arithmetic over their courses; the lab itself is run by hand."""

from __future__ import annotations

import argparse
import json

import pytest

from paper.setting import CONDITIONS, ORACLE, job_from_dict, layout_of
from tatami.tiling import plan
from tatami.workload import net_workload
from watched import CONTESTANTS, NOTICE, QUIET, SETTLING, draw, job_of, summary

OPTIONS = argparse.Namespace(n=4, net="203-80-26", samples=1024, iterations=200)


@pytest.mark.parametrize("seed", range(20))
def test_in_a_trace_one_host_at_a_time_is_slow_and_as_fast_as_before_afterwards(seed: int) -> None:
    changes = draw(seed, iterations=400, num=8)
    first = dict(zip((f"h{i}" for i in range(8)), CONDITIONS["A"], strict=True))
    at = [change.after_iteration for change in changes]
    assert at == sorted(at)
    assert all(QUIET <= one < 400 for one in at)
    for slow, back in zip(changes[::2], changes[1::2], strict=False):
        assert back.after_iteration - slow.after_iteration >= QUIET
        assert slow.speed <= first[slow.host] / 1.25 * (1 + 1e-12)
        assert (back.host, back.speed) == (slow.host, first[slow.host])


def test_each_trace_has_another_order_of_contestants_and_is_read_as_it_was_written() -> None:
    jobs = [job_of(seed, options=OPTIONS) for seed in range(3)]
    assert {job.contestants[0] for job in jobs} == set(CONTESTANTS)
    assert all(job_from_dict(json.loads(json.dumps(job.to_dict()))) == job for job in jobs)


def test_the_oracle_lies_as_the_planner_says() -> None:
    job = job_of(0, options=OPTIONS)
    work = net_workload(job.net, samples=job.samples)
    assert layout_of(ORACLE, cluster=job.cluster, workload=work) == plan(cluster=job.cluster, workload=work).layout


def test_the_summary_compares_whole_courses() -> None:
    def record(seed: int, contestant: str, total_s: float) -> dict[str, object]:
        return {"record": "traced", "seed": seed, "contestant": contestant, "total_s": total_s}

    records = [
        record(seed, name, total) for seed in (0, 1) for name, total in ((NOTICE, 10.4), (SETTLING, 12.0), (ORACLE, 10.0))
    ]
    text = summary([*records, record(2, NOTICE, 1.0), {"record": "test bed"}])
    assert "2 traces; the course of the oracle takes 10.0 s" in text
    assert "notice-speeds: 1.040 x the oracle's" in text
    assert "in 2 of 2 traces" in text
    assert summary([]) == "no trace was measured whole"
