"""A run that is watched, in the small: noticed, weighed, paid for, and left alone where nothing is to be gained."""

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tatami.cluster import Cluster, Processor
from tatami.errors import PlanError
from tatami.retiling import Decision, DecisionKind, Retiler, Timing, Watcher
from tatami.retiling.options import levels
from tatami.retiling.situation import Situation
from tatami.retiling.watching import Found, _tell_places
from tatami.tiling import Layout, Replica, plan
from tatami.workload import Workload

CONDITION_A = (0.25, 0.31, 0.63, 1.0, 1.0, 0.42, 0.67, 0.63)
NETWORK = Workload.mlp(203, 800, 26, samples=8192)
FLOP_PER_S = 1e10


@dataclass
class Watched:
    """A run on hosts of their own; `factors` of the speeds may be changed between iterations.

    Attributes:
        outgrown: tiles of more work than this take half as long again.
    """

    watcher: Watcher
    noise: float
    factors: np.ndarray
    seed: int = 0
    outgrown: float = float("inf")
    iteration: int = 0
    total_s: float = 0.0
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def go(self, iterations: int) -> list[Decision]:
        before = len(self.decisions)
        for _ in range(iterations):
            self.iteration += 1
            works = self.watcher.works
            values = np.full(len(CONDITION_A), np.nan)
            for rank, name in enumerate(self.watcher.cluster.by_name):
                jitter = np.exp(self.noise * self.random.standard_normal()) * (3.0 if self.random.random() < 0.01 else 1.0)
                speed = CONDITION_A[rank] * self.factors[rank] * FLOP_PER_S / NETWORK.work_flop
                if name in works:
                    values[rank] = jitter / speed * (1.5 if works[name] > self.outgrown else 1.0)
                elif self.iteration % 16 == 0:
                    values[rank] = jitter / speed
            self.total_s += max(values[rank] * works.get(f"p{rank}", 0.0) for rank in range(8) if f"p{rank}" in works)
            decision = self.watcher.take(self.iteration, values)
            if decision is not None:
                self.decisions.append(decision)
                if decision.remaps:
                    self.watcher.moved(0.01)
        return self.decisions[before:]


def watched(*, noise: float = 0.05, known: bool = True, seed: int = 0, outgrown: float = float("inf")) -> Watched:
    speeds = CONDITION_A if known else (1.0,) * 8
    cluster = Cluster(processors=tuple(Processor(name=f"p{i}", speed=speed, host=f"h{i}") for i, speed in enumerate(speeds)))
    layout = plan("timed" if known else "even", cluster=cluster, workload=NETWORK).layout
    watcher = Watcher(Retiler(), cluster=cluster, workload=NETWORK, layout=layout, known_speeds=known)
    return Watched(watcher=watcher, noise=noise, factors=np.ones(8), seed=seed, outgrown=outgrown)


def test_from_no_knowledge_it_lays_the_tiles_as_soon_as_the_speeds_are_known() -> None:
    run = watched(known=False)
    first, *rest = run.go(300)
    assert first.iteration <= 16
    assert first.remaps
    assert first.predicted > 0.9
    assert sum(decision.remaps for decision in rest) <= 1


@pytest.mark.parametrize("slow", [3, 6])
def test_a_rank_half_as_fast_is_relieved_at_once_and_taken_up_again(slow: int) -> None:
    run = watched()
    assert run.go(300) == []
    run.factors[slow] = 0.5
    moved = [decision for decision in run.go(300) if decision.remaps]
    assert 302 <= moved[0].iteration <= 305
    assert len(moved) <= 2
    assert f"p{slow} takes" in moved[0].reason
    (alarm, *_) = run.watcher.alarms
    assert (alarm.processor, alarm.began) == (f"p{slow}", 301)
    assert alarm.slower == pytest.approx(2.0, rel=0.15)
    run.factors[slow] = 1.0
    back = [decision for decision in run.go(300) if decision.remaps]
    assert 602 <= back[0].iteration <= 640
    assert back[-1].predicted > 0.9


def test_a_change_early_in_a_run_is_acted_on_wherever_the_estimates_are_refreshed() -> None:
    """Level and noise are estimated every 8 samples; samples of a change that is not known yet do not count as noise."""
    noticed, acted = [], []
    for quiet in range(16, 33, 3):
        for seed in range(2):
            run = watched(seed=seed)
            run.go(quiet)
            run.factors[3] = 0.5
            acted.append(next(decision.iteration for decision in run.go(10) if decision.remaps) - quiet)
            noticed.append(next(alarm.iteration for alarm in run.watcher.alarms if alarm.processor == "p3") - quiet)
    assert max(noticed) <= 4
    assert sorted(acted)[len(acted) // 2] <= 4


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_nothing_is_moved_in_a_quiet_run_of_unequal_ranks(noise: float) -> None:
    """10,000 iterations are in tests/benchmarks/test_watching_quiet.py."""
    assert not any(decision.remaps for decision in watched(noise=noise).go(1_000))


def test_a_change_that_is_not_worth_its_price_is_borne() -> None:
    run = watched()
    run.go(200)
    run.watcher.moved(1e6)  # moving takes days
    run.factors[3] = 0.5
    found = run.go(100)
    assert found
    assert all(decision.kind is DecisionKind.KEEP for decision in found)
    assert "ms an iteration lost" in found[0].reason


def test_a_rank_that_all_but_stops_is_left_out_or_given_next_to_nothing_and_comes_back() -> None:
    run = watched()
    run.go(200)
    run.factors[6] = 0.02
    run.go(100)
    assert run.watcher.works.get("p6", 0.0) < 0.05 * NETWORK.samples * NETWORK.units / 8
    run.factors[6] = 1.0
    run.go(400)
    assert run.watcher.works["p6"] > 0.5 * NETWORK.samples * NETWORK.units / 8


def test_a_rank_left_out_is_known_by_the_speed_that_was_given_until_it_was_measured() -> None:
    run = watched()
    others = tuple(f"p{rank}" for rank in range(8) if rank != 6)
    placed = plan(cluster=Cluster(processors=tuple(run.watcher.cluster.by_name[name] for name in others)), workload=NETWORK)
    watcher = Watcher(Retiler(), cluster=run.watcher.cluster, workload=NETWORK, layout=placed.layout, known_speeds=True)
    assert np.isnan(watcher.per_work_s("p6"))
    for iteration in range(1, 9):
        watcher.take(iteration, np.array([0.0 if rank == 6 else 2.0 / CONDITION_A[rank] for rank in range(8)]))
    assert watcher.per_work_s("p6") == pytest.approx(2.0 / CONDITION_A[6])
    assert watcher.per_work_s("p3") == pytest.approx(2.0)


@pytest.mark.parametrize("lengths", [(20, 20), (300, 30)])
def test_a_rank_that_alternates_costs_at_most_twice_what_it_costs_to_do_without_it(lengths: tuple[int, int]) -> None:
    """Next to stopped and fast, for so many iterations each; a move costs 10 ms."""
    run = watched()
    run.go(200)
    run.total_s, run.decisions = 0.0, []
    while run.iteration < 1400:
        for factor, length in zip((0.02, 1.0), lengths, strict=True):
            run.factors[6] = factor
            run.go(length)
    moves = sum(decision.remaps for decision in run.decisions)
    speeds = [speed * FLOP_PER_S / NETWORK.work_flop for rank, speed in enumerate(CONDITION_A) if rank != 6]
    without_s = NETWORK.samples * NETWORK.units / sum(speeds)
    assert run.total_s + 0.01 * moves < 2 * without_s * (run.iteration - 200)


@pytest.mark.parametrize("seed", range(3))
def test_forecasts_that_are_wrong_do_not_move_rows_for_ever(seed: int) -> None:
    run = watched(outgrown=NETWORK.samples * NETWORK.units / 8, seed=seed)
    assert sum(decision.remaps for decision in run.go(250)) <= 10
    assert not any(decision.remaps for decision in run.go(1250))


def test_a_layout_that_needs_more_messages_must_pay_even_if_they_take_longer_than_predicted() -> None:
    processors = tuple(Processor(name=f"p{i}", speed=speed, host=f"h{i}") for i, speed in enumerate(CONDITION_A))
    replicas = tuple(Replica(width=0.125, processors=(each.name,), heights=(1.0,)) for each in processors)
    situation = Situation(
        retiler=Retiler(), cluster=Cluster(processors=processors), workload=NETWORK, layout=Layout(replicas=replicas)
    )
    speeds = {each.name: each.speed * FLOP_PER_S / NETWORK.work_flop for each in processors}
    stay_s, (shifted, *others) = levels(situation, speeds, fixed_s=0.005)
    assert shifted.kind == DecisionKind.SAMPLES
    assert shifted.iteration_s < 0.5 * stay_s
    # Layouts with several ranks in a replica are predicted to be a little faster, and are not believed.
    assert not others


def test_a_machine_whose_messages_slowed_down_with_it_is_left_out_as_soon_as_that_is_faster() -> None:
    """With two thirds of its speed gone it still computes; but what it sends takes longer than what it saves."""
    known = tuple(
        Processor(name=f"p{i}", speed=speed * FLOP_PER_S, host=f"h{i}", message_s=0.4e-3 / speed, copy_bytes_per_s=1e9 * speed)
        for i, speed in enumerate(CONDITION_A)
    )
    unknown = tuple(Processor(name=each.name, speed=each.speed, host=each.host) for each in known)
    replicas = tuple(Replica(width=each.speed / FLOP_PER_S / 4.91, processors=(each.name,), heights=(1.0,)) for each in known)
    kinds = []
    for processors in (known, unknown):
        situation = Situation(
            retiler=Retiler(), cluster=Cluster(processors=processors), workload=NETWORK, layout=Layout(replicas=replicas)
        )
        speeds = {each.name: each.speed / NETWORK.work_flop * (0.3 if each.name == "p1" else 1.0) for each in processors}
        _, found = levels(situation, speeds, fixed_s=0.005)
        kinds.append([level.kind for level in found])
        if processors is known:
            assert "p1" not in found[-1].layout.processors
    assert kinds[0][-1] is DecisionKind.LEAVE
    assert DecisionKind.LEAVE not in kinds[1]


def test_a_rank_that_recovers_is_known_to_be_as_fast_as_it_was_from_the_alarm_on() -> None:
    run = watched()
    run.go(200)
    usual_s = run.watcher.per_work_s("p6")
    run.factors[6] = 0.25
    run.go(60)
    assert run.watcher.per_work_s("p6") == pytest.approx(4 * usual_s, rel=0.1)
    run.factors[6] = 1.0
    while len(run.watcher.alarms) < 2:
        run.go(1)
    assert run.iteration <= 265
    assert run.watcher.per_work_s("p6") == pytest.approx(usual_s, rel=0.02)


def test_nothing_is_moved_while_something_may_just_have_changed() -> None:
    """A second machine becomes slow just before the tiles would have moved for the first: they move for both."""

    def run_of(second_at: int | None, iterations: int) -> Watched:
        run = watched(noise=0.02)
        run.go(200)
        run.watcher.moved(0.3)
        run.factors[3] = 0.8
        for _ in range(iterations):
            if run.iteration + 1 == second_at:
                run.factors[5] = 0.1
            run.go(1)
        return run

    alone = [decision for decision in run_of(None, 60).decisions if decision.remaps]
    moves_at = alone[0].iteration
    assert moves_at > 205
    both = [decision for decision in run_of(moves_at - 1, 70).decisions if decision.remaps]
    first = both[0]
    assert moves_at < first.iteration <= moves_at + 5
    truly = (CONDITION_A[5] * 0.1) / (CONDITION_A[3] * 0.8)
    assert first.speeds["p5"] / first.speeds["p3"] == pytest.approx(truly, rel=0.15)


def test_who_is_far_out_of_balance_moves_even_if_the_last_move_did_not_bring_what_it_promised() -> None:
    moved = {}
    for factor in (0.8, 0.1):
        run = watched(noise=0.02)
        run.go(200)
        run.watcher.moved(0.3)
        run.watcher._distrust = 1000.0
        run.factors[3] = factor
        moved[factor] = any(decision.remaps for decision in run.go(60))
    assert moved == {0.8: False, 0.1: True}


def test_it_says_who_is_left_out_and_who_is_taken_in_again() -> None:
    def of(*names: str) -> Layout:
        return Layout(replicas=tuple(Replica(width=1 / len(names), processors=(name,), heights=(1.0,)) for name in names))

    assert _tell_places(of("p0", "p1"), of("p1", "p0")) == ""
    assert _tell_places(of("p0", "p1", "p2"), of("p1", "p3")) == "; left out: p0, p2; taken in again: p3"


def test_bursts_of_a_rank_that_is_slow_are_not_taken_for_its_speed() -> None:
    """Where a quota is used up in other parts of an iteration, a small tile may compute as if there was none."""
    run = watched()
    run.go(100)
    run.factors[6] = 0.2
    run.go(40)
    alarms, works = len(run.watcher.alarms), run.watcher.works["p6"]
    for _ in range(5):
        run.factors[6] = 10.0
        run.go(4)
        run.factors[6] = 0.2
        run.go(8)
    assert len(run.watcher.alarms) == alarms
    assert run.watcher.works["p6"] == pytest.approx(works, rel=0.2)
    run.factors[6] = 10.0
    run.go(40)
    assert run.watcher.works["p6"] > 4 * works


def test_one_rank_plans_for_all_and_what_it_finds_may_travel() -> None:
    """Two ranks: one plans, the other takes what comes as bytes; both decide the same to the bit."""
    one, other = watched(seed=7), watched(seed=7)
    leaders: list[str] = []
    sent: list[bytes] = []

    def leads(leader: str, compute: Callable[[], Found]) -> tuple[Found, float]:
        leaders.append(leader)
        found = compute()
        sent.append(pickle.dumps((found, 0.02)))
        return found, 0.02

    def follows(leader: str, compute: Callable[[], Found]) -> Any:  # noqa: ARG001
        assert leader == leaders[-len(sent)]
        return pickle.loads(sent.pop(0))

    one.watcher.planned, other.watcher.planned = leads, follows
    for factor in (1.0, 0.6, 1.0):
        for run in (one, other):
            run.factors[2] = factor
            run.go(50)
    assert not sent
    assert one.decisions == other.decisions
    assert one.watcher.layout == other.watcher.layout
    assert any(decision.remaps for decision in one.decisions)
    assert set(leaders) <= {"p3", "p4"}  # the fastest


def test_looks_that_cost_more_than_they_may_bring_are_left_out() -> None:
    def looks(took_s: float) -> int:
        run, found = watched(), 0

        def planned(leader: str, compute: Callable[[], Found]) -> tuple[Found, float]:  # noqa: ARG001
            nonlocal found
            found += 1
            return compute(), took_s

        run.watcher.planned = planned
        run.go(100)
        assert not run.watcher.alarms
        return found

    assert looks(1e6) == 1  # before the first, nothing is known of it
    assert looks(0.0) > 2


def test_equal_timings_give_equal_decisions_bit_for_bit() -> None:
    runs = [watched(seed=7), watched(seed=7)]
    for run in runs:
        run.go(50)
        run.factors[2] = 0.6
        run.go(50)
    one, other = runs
    assert [each.reason for each in one.decisions] == [each.reason for each in other.decisions]
    assert one.watcher.layout == other.watcher.layout
    assert one.decisions


def bytecodes(watcher: Watcher, *, ranks: int) -> int:
    """Python instructions of a quiet iteration's watching."""
    late_s = [message.expected_s for message in watcher.links.messages]
    for iteration in range(1, 65):
        assert watcher.take(iteration, np.ones(ranks), late_s=late_s) is None
    found = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal found
        frame.f_trace_opcodes = True
        found += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        watcher.take(65, np.ones(ranks), late_s=late_s)
    finally:
        sys.settrace(before)
    return found


def test_a_quiet_iteration_takes_as_many_instructions_for_48_ranks_and_links_as_for_4() -> None:
    found = []
    for ranks in (4, 48):
        names = tuple(f"p{i}" for i in range(ranks))
        cluster = Cluster(processors=tuple(Processor(name=name, speed=1.0, host=f"h{name}") for name in names))
        half = ranks // 2
        replicas = tuple(Replica(width=0.5, processors=own, heights=(1 / half,) * half) for own in (names[:half], names[half:]))
        watcher = Watcher(Retiler(), cluster=cluster, workload=NETWORK, layout=Layout(replicas=replicas), known_speeds=True)
        assert len(watcher.links.messages) == ranks
        found.append(bytecodes(watcher, ranks=ranks))
    assert found[0] == found[1] < 1000


def test_a_timing_of_a_stranger_is_refused() -> None:
    timing = Timing(processor="p9", iteration=1, t1_s=1, t2_s=1, compute_s=1, work=1)
    with pytest.raises(PlanError, match="a timing of 'p9' in iteration 1"):
        watched().watcher.observe(1, [timing])


def test_the_rule_follows_from_what_is_given() -> None:
    assert Retiler().rule == "notice"
    assert Retiler(planner="srpm").rule == "notice"
    assert Retiler(every=10).rule == "settling"
    assert Retiler.published().rule == "published"
