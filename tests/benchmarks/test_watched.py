"""Traces of slowdowns for the lab, what is noticed in them, and the arithmetic over their courses."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import detection
from detection import alarms_of, times_of
from faulty.judging import WARM, Mark, marks_of, share_of_changes, throughput, usual_s
from paper.setting import CONDITIONS, ORACLE, EvaluationJob, job_from_dict, layout_of
from tatami.errors import LabError
from tatami.retiling.noticing import Detector
from tatami.retiling.thresholds import FALSE_ALARMS
from tatami.tiling import plan
from tatami.workload import net_workload
from watched import CONTESTANTS, NOTICE, QUIET, SETTLING, draw, job_of, parse_seeds, run, summary
from watching import NOISES, RANKS, late_times, quiet, quiet_times, watcher

OPTIONS = argparse.Namespace(n=4, net="203-80-26", samples=1024, iterations=200, cores=None, timeout=600.0)


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
    job = job_of(range(3), options=OPTIONS)
    assert [trace.seed for trace in job.traces] == [0, 1, 2]
    assert {trace.contestants[0] for trace in job.traces} == set(CONTESTANTS)
    assert job_from_dict(json.loads(json.dumps(job.to_dict()))) == job


def test_the_oracle_lies_as_the_planner_says() -> None:
    job = job_of([0], options=OPTIONS)
    work = net_workload(job.net, samples=job.samples)
    assert layout_of(ORACLE, cluster=job.cluster, workload=work) == plan(cluster=job.cluster, workload=work).layout


def test_the_summary_compares_whole_courses() -> None:
    def record(seed: int, contestant: str, total_s: float) -> dict[str, object]:
        return {"record": "traced", "seed": seed, "contestant": contestant, "total_s": total_s, "told_moves_s": 2.0 * seed}

    records = [
        record(seed, name, total) for seed in (0, 1) for name, total in ((NOTICE, 10.4), (SETTLING, 12.0), (ORACLE, 10.0))
    ]
    text = summary([*records, record(2, NOTICE, 1.0), {"record": "test bed"}])
    assert "2 of 20 traces; the course of the oracle takes 10.0 s" in text
    assert "notice-speeds: 1.040 x the oracle's" in text
    assert "notice-speeds: 1.156 x that of an oracle whose own planning and moves, 1.0 s in the mean, cost nothing" in text
    assert "in 2 of 2 traces" in text
    assert summary([]) == "no trace was measured whole"


def test_a_trace_that_is_there_is_not_run_again_and_a_part_of_one_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def fake(job: EvaluationJob, *, told: Callable[[dict[str, Any]], None], **_: object) -> list[dict[str, Any]]:
        seen.append([trace.seed for trace in job.traces])
        for trace in job.traces:
            for name in trace.contestants:
                if (trace.seed, name) == (7, trace.contestants[2]):
                    raise LabError("a host is gone")
                facts = {"record": "traced", "seed": trace.seed, "contestant": name, "total_s": 1.0, "trace": [], "checks": []}
                setting = {"net": job.net, "samples": job.samples, "num": job.num, "condition": job.condition}
                setting["bandwidth_bytes_per_s"] = job.bandwidth_bytes_per_s
                told({**facts, **setting, "iteration_s": [0.005] * job.course})
        return []

    monkeypatch.setattr("watched.run_job", fake)
    out = tmp_path / "watched.jsonl"
    for asked in ("0-2", "1-6"):
        run(argparse.Namespace(**vars(OPTIONS), traces=parse_seeds(asked), out=out))
    assert seen == [[0, 1, 2], [3, 4, 5, 6]]
    with pytest.raises(SystemExit, match="a host is gone"):
        run(argparse.Namespace(**vars(OPTIONS), traces=parse_seeds("0-8"), out=out))
    assert seen[-1] == [7, 8]
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(line["seed"]) for line in lines] == [seed for seed in range(7) for _ in CONTESTANTS]
    with pytest.raises(SystemExit, match="give another --out"):
        run(argparse.Namespace(**{**vars(OPTIONS), "samples": 512}, traces=parse_seeds("7"), out=out))


@pytest.mark.parametrize("noise", NOISES)
def test_nothing_is_moved_in_a_quiet_run_of_10_000_iterations(noise: float) -> None:
    """Through `Watcher`, its planner and prices; 20 seeds of each noise are run by `benchmarks/watching.py`."""
    _, remaps = quiet(noise, iterations=10_000, seed=0, hosts=False)
    assert remaps == 0


@pytest.mark.parametrize("seed", range(5))
def test_nor_where_links_are_watched_as_well(seed: int) -> None:
    _, remaps = quiet(0.05, iterations=400, seed=seed)
    assert remaps == 0


def test_20_quiet_runs_of_each_noise_have_no_more_alarms_than_stated() -> None:
    """20 seeds x 3 noises x 4,000 iterations side by side: 2.4 alarms are expected; 9 or more come up once in 1,000 times."""
    runs = np.stack([quiet_times(noise, iterations=4_000, seed=seed) for noise in NOISES for seed in range(20)], axis=1)
    detector = Detector(runs.shape[1:])
    alarms = sum(int(detector.step(values).any(axis=1).sum()) for values in runs)
    assert runs.shape == (4_000, 60, RANKS)
    assert pytest.approx(2.4) == FALSE_ALARMS * 240_000
    assert alarms < 9


def test_a_message_each_way_between_hosts_that_share_units_is_watched() -> None:
    watched = watcher(hosts=True)
    assert len(watched.links.messages) == RANKS
    assert late_times(watched, 0.05, iterations=3, seed=0).shape == (3, RANKS)
    assert watcher(hosts=False).links.messages == ()


@pytest.mark.parametrize("kind", ["50 %", "drift"])
def test_a_watcher_raises_the_alarms_that_are_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "ITERATIONS", 1000)
    rng = np.random.default_rng(0)
    times = times_of(detection.draw(0.05, kind, runs=3, rng=rng), rng)
    counted = alarms_of("notice", times)
    assert counted.any()
    for number in range(3):
        watched = watcher(hosts=False)
        watched.moved(1e12)  # so that no tiles move, which the benchmark accounts for by itself
        for iteration, values in enumerate(times[:, number], start=1):
            watched.take(iteration, values)
        raised = {(alarm.iteration - 1, int(alarm.processor[1:])) for alarm in watched.alarms}
        assert raised == {(int(at), int(rank)) for at, rank in np.argwhere(counted[:, number])}
        assert counted.shape[2] == detection.RANKS


SPEEDS = {"a": 1.0, "b": 1.0, "c": 2.0}


def marks(*spans: tuple[float, str]) -> list[Mark]:
    """After the steps that are not counted, steps of these seconds on these hosts."""
    found = [Mark(number=number, at_s=float(number), loss=0.0, hosts=("a", "b", "c")) for number in range(WARM + 1)]
    for span_s, hosts in spans:
        found.append(replace(found[-1], number=found[-1].number + 1, at_s=found[-1].at_s + span_s, hosts=tuple(hosts)))
    return found


def test_a_step_that_two_ranks_tell_of_counts_once() -> None:
    found = marks_of("1 11.0 0.5 a,b\n0 10.0 0.75 b,a\n1 11.5 0.5 a\n")
    assert [(mark.number, mark.at_s, mark.loss, mark.hosts) for mark in found] == [
        (0, 10.0, 0.75, ("a", "b")),
        (1, 11.0, 0.5, ("a", "b")),
    ]


def test_a_run_without_changes_does_all_that_its_machines_can() -> None:
    found = marks(*[(1.0, "abc")] * 6)
    assert usual_s(found) == 1.0
    assert throughput(found, speeds=SPEEDS) == (1.0, 1.0)
    assert share_of_changes(found) == 0.0


def test_what_a_change_costs_is_missing() -> None:
    """Two machines of half the speed take twice the time; the first of their steps has two seconds of repair in it."""
    found = marks(*[(1.0, "abc")] * 4, (4.0, "ab"), *[(2.0, "ab")] * 3)
    assert throughput(found, speeds=SPEEDS) == pytest.approx((8 / 9, 8 / 9))
    assert share_of_changes(found) == 2 / 14


def test_a_layout_that_wastes_machines_shows_by_their_speeds_alone() -> None:
    found = marks(*[(1.0, "abc")] * 4, *[(4.0, "ab")] * 4)
    assert throughput(found, speeds=SPEEDS) == pytest.approx((1.0, 8 / 12))


def test_a_rank_is_killed_every_so_often_and_another_joins_for_it() -> None:
    leading = pytest.importorskip("faulty.leading", reason="Ray is not installed")
    from tatami.elastic import MemberChange

    class Control:
        members = ("p0", "p1", "p2")
        added = 0

        def add(self) -> str:
            self.added += 1
            return f"p{2 + self.added}"

        def remove(self, name: str) -> None:
            raise AssertionError(name)

    now_s, killed, control = [0.0], list[str](), Control()
    faults = leading.Faults(30.0, kill=killed.append, now_s=lambda: now_s[0])
    faults.start(control)
    for now_s[0] in (1.0, 30.0, 31.0, 32.0, 60.0, 61.0):
        faults.line("p0", leading.STEP)
    assert len(killed) == faults.struck == 2
    assert set(killed) <= set(control.members)
    change = MemberChange(
        at_s=31.0,
        reason="p1 died",
        step=3,
        settled="redone",
        members=("p0", "p2"),
        halted_s=0.1,
        laid_s=0.1,
        lost_s=0.5,
        moved_units=0,
    )
    faults.changed(change)
    assert control.added == 1
    faults.changed(replace(change, members=("p0", "p2", "p3")))
    assert control.added == 1
