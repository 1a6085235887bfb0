"""What the benchmark of elastic runs in a lab makes of its steps, and when it kills whom."""

from dataclasses import replace
from pathlib import Path

import pytest

from faulty.judging import WARM, Mark, marks_of, share_of_changes, throughput, usual_s
from faulty.training import Training, cluster_of

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


def test_machines_that_do_one_step_only_are_judged_by_their_speeds() -> None:
    found = marks(*[(1.0, "abc")] * 4, (3.0, "ab"), *[(1.0, "abc")] * 3)
    assert throughput(found, speeds=SPEEDS)[0] == pytest.approx(8 / (4 + 1.5 + 3))


def test_a_second_rank_of_a_host_has_another_name() -> None:
    assert [each.name for each in cluster_of(SPEEDS, hosts=("a", "c", "a")).processors] == ["a", "c", "a/2"]


def test_a_training_comes_back_from_its_file(tmp_path: Path) -> None:
    training = Training(
        samples=8, steps=3, speeds=SPEEDS, quotas={"a": ["/group"]}, layout=None, every_s=30.0, folder=str(tmp_path)
    )
    assert Training.read(training.write()) == training


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
