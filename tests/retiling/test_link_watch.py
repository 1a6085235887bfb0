"""Links between replicas are watched as ranks are; planners and prices see them as they became."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tatami.cluster import Cluster, Link, Processor
from tatami.errors import PlanError
from tatami.retiling import Decision, Retiler, StagedWatcher, Watcher
from tatami.retiling.estimates import Estimates
from tatami.retiling.link_watch import watched_messages
from tatami.tiling import Layout, Replica, StagedPlan, plan_stages, price_stages
from tatami.workload import Piece, Workload

WORK = Workload.mlp(64, 512, 64, samples=512)
NET = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-4)


def hosts(number: int) -> Cluster:
    return Cluster(processors=tuple(Processor(name=f"p{i}", speed=1e9, host=f"h{i}") for i in range(number)), network=NET)


TWO_BY_TWO = Layout(
    replicas=(
        Replica(width=0.5, processors=("p0", "p1"), heights=(0.5, 0.5)),
        Replica(width=0.5, processors=("p2", "p3"), heights=(0.5, 0.5)),
    )
)


def test_the_largest_message_each_way_between_hosts_of_different_replicas_is_watched() -> None:
    found = watched_messages(TWO_BY_TWO, cluster=hosts(4), workload=WORK)
    assert [(each.source, each.dest, each.hosts) for each in found] == [
        (0, 2, ("h0", "h2")),
        (1, 3, ("h1", "h3")),
        (2, 0, ("h0", "h2")),
        (3, 1, ("h1", "h3")),
    ]
    size_bytes = 256 * 128 * 4
    assert found[0].expected_s == pytest.approx(NET.transfer_s(size_bytes), rel=0.01)  # and a few numbers that ride along
    assert watched_messages(TWO_BY_TWO, cluster=Cluster.from_speeds([1.0] * 4), workload=WORK) == ()


@dataclass
class Linked:
    """A run on four hosts of their own whose links take `factors` of the expected times, with noise."""

    watcher: Watcher
    factors: dict[tuple[str, str], float] = field(default_factory=dict)
    noise: float = 0.05
    iteration: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(0)

    def go(self, iterations: int) -> list[Decision]:
        found = []
        for _ in range(iterations):
            self.iteration += 1
            values = WORK.work_flop / 1e9 * np.exp(self.noise * self.random.standard_normal(4))
            late_s = [
                each.expected_s * self.factors.get(each.hosts, 1.0) * float(np.exp(self.noise * self.random.standard_normal()))
                # One of the two sides was there first.
                if (each.source < each.dest) == (self.iteration % 2 == 0)
                else -0.01
                for each in self.watcher.links.messages
            ]
            decision = self.watcher.take(self.iteration, values, late_s=late_s)
            if decision is not None:
                found.append(decision)
                if decision.remaps:
                    self.watcher.moved(0.001)
        return found


def linked() -> Linked:
    return Linked(Watcher(Retiler(), cluster=hosts(4), workload=WORK, layout=TWO_BY_TWO, known_speeds=True))


def test_a_link_that_takes_four_times_as_long_is_named_within_four_iterations_and_is_itself_again() -> None:
    random = np.random.default_rng(0)
    known = Estimates(hosts(4), workload=WORK, layout=TWO_BY_TWO)
    watch = known.links

    def go(factor: float, iterations: int) -> list[int]:
        at = []
        for iteration in range(iterations):
            noise = np.exp(0.05 * random.standard_normal(len(watch.messages)))
            late_s = [
                each.expected_s * float(jitter) * (factor if each.hosts == ("h0", "h2") else 1.0)
                for each, jitter in zip(watch.messages, noise, strict=True)
            ]
            changes = known.take(iteration, np.ones(4), late_s=late_s)
            assert {each.link for each in changes} <= {("h0", "h2")}
            at += [iteration + 1 for _ in changes]
        return at

    assert go(1.0, 200) == []
    assert watch.cluster == hosts(4)
    (noticed,) = go(4.0, 100)
    assert noticed <= 4
    assert list(watch.slow_hosts) == ["h0", "h2"]
    assert watch.cluster.link("p0", "p2").bandwidth_bytes_per_s == pytest.approx(NET.bandwidth_bytes_per_s / 4, rel=0.15)
    assert watch.cluster.link("p1", "p3") == NET
    (back,) = go(1.0, 100)
    assert back <= 4
    assert list(watch.slow_hosts) == []
    assert watch.cluster.link("p0", "p2") == NET


def test_messages_that_were_there_already_are_no_samples() -> None:
    known = Estimates(hosts(4), workload=WORK, layout=TWO_BY_TWO)
    for factor in (1.0, 100.0):
        for iteration in range(50):
            assert known.take(iteration, np.ones(4), late_s=[-factor] * len(known.links.messages)) == []


def test_of_both_directions_the_faster_message_counts() -> None:
    links = Estimates(hosts(4), workload=WORK, layout=TWO_BY_TWO).links
    expected_s = np.array([message.expected_s for message in links.messages])
    assert links.pairs == (("h0", "h2"), ("h1", "h3"))
    # Of 0 -> 2, 1 -> 3, 2 -> 0, 3 -> 1.
    assert links.slowness(list(expected_s * [3.0, 5.0, 2.0, -1.0])) == pytest.approx([2.0, 5.0])
    assert np.isnan(links.slowness(list(expected_s * [1.0, -1.0, 1.0, 0.0]))).tolist() == [False, True]
    assert np.isnan(links.slowness([])).all()


def test_the_tiles_are_laid_so_that_a_slow_link_is_not_used() -> None:
    run = linked()
    assert run.go(200) == []
    run.factors[("h0", "h2")] = 20.0
    found = run.go(40)
    (alarm, *_) = run.watcher.alarms
    assert alarm.link == ("h0", "h2")
    assert alarm.iteration <= 210
    assert "the link h0 - h2 takes" in found[0].reason
    assert any(decision.remaps for decision in found)
    assert ("h0", "h2") not in {message.hosts for message in run.watcher.links.messages}


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_links_that_only_are_noisy_move_nothing(noise: float) -> None:
    run = linked()
    run.noise = noise
    assert not any(decision.remaps for decision in run.go(500))


PIECES = 12


def workload() -> Workload:
    pieces = tuple(
        Piece(
            name=f"layer {number}",
            flop_per_sample=6e8,
            parameters=100_000,
            activation_bytes_per_sample=1e5,
            crossing_bytes_per_sample=1e4 if number else 0.0,
        )
        for number in range(PIECES)
    )
    return Workload(samples=32, blocks=(), pieces=pieces, replicated_parameters=PIECES * 100_000, trained_tensors=PIECES)


def cluster(*speeds: float, bandwidth: float = 12.5e6) -> Cluster:
    link = Link(bandwidth_bytes_per_s=bandwidth, latency_s=1e-4)
    processors = tuple(Processor(name=f"p{rank}", speed=1e10 * speed, host=f"h{rank}") for rank, speed in enumerate(speeds))
    return Cluster(processors=processors, network=link)


class Run:
    """Machines that compute as long as the price of the layout in force says, at speeds that change."""

    def __init__(self, *speeds: float, noise: float = 0.02, seed: int = 0) -> None:
        self.machines, self.workload = cluster(*speeds), workload()
        plan = plan_stages(self.machines, self.workload)
        assert plan is not None
        self.watcher = StagedWatcher(cluster=self.machines, workload=self.workload, layout=plan.layout)
        self.slower = dict.fromkeys(self.machines.by_name, 1.0)
        self._random, self._noise, self.iteration = np.random.default_rng(seed), noise, 0

    def go(self, iterations: int) -> list[Decision]:
        """The moves."""
        found = []
        for _ in range(iterations):
            self.iteration += 1
            values = np.array(
                [
                    self.slower[name] * (1 + self._noise * self._random.standard_normal())
                    if name in self.watcher.works
                    else 0.0
                    for name in self.machines.by_name
                ]
            )
            decision = self.watcher.take(self.iteration, values)
            if decision is not None and decision.remaps:
                found.append(decision)
        return found

    def priced(self) -> StagedPlan:
        """The layout in force at the machines' speeds of now."""
        speeds = [1.0 / self.slower[name] * each.speed / 1e10 for name, each in self.machines.by_name.items()]
        return price_stages(self.watcher.layout, cluster=cluster(*speeds), workload=self.workload)


@pytest.mark.parametrize("seed", range(3))
def test_a_calm_run_is_left_alone(seed: int) -> None:
    run = Run(1.0, 1.0, 0.5, 0.5, seed=seed)
    assert run.go(400) == []
    assert not run.watcher.alarms


@pytest.mark.parametrize("slow", ["p0", "p3"])
def test_a_slower_machine_gets_fewer_pieces_and_gets_them_back(slow: str) -> None:
    run = Run(1.0, 1.0, 0.5, 0.5)
    run.go(40)
    before = {rank.processor: rank.stop - rank.first for rank in run.priced().ranks}
    run.slower[slow] = 3.0
    stay_s = run.priced().iteration_s
    (moved, *more) = run.go(60)
    assert len(more) <= 1
    assert moved.iteration > 40
    assert slow in [alarm.processor for alarm in run.watcher.alarms]
    after = {rank.processor: rank.stop - rank.first for rank in run.priced().ranks}
    assert after.get(slow, 0) < before[slow]
    assert run.priced().iteration_s < 0.8 * stay_s
    best = plan_stages(cluster(*(s / run.slower[f"p{r}"] for r, s in enumerate((1.0, 1.0, 0.5, 0.5)))), run.workload)
    assert best is not None
    assert run.priced().iteration_s <= 1.05 * best.iteration_s
    if slow in after:  # one that was left out is not measured any more
        run.slower[slow] = 1.0
        assert run.go(100)
        assert {rank.processor: rank.stop - rank.first for rank in run.priced().ranks}[slow] > after[slow]


def test_a_run_from_equal_speeds_finds_the_true_ones() -> None:
    run = Run(1.0, 1.0, 1.0, 1.0)
    run.slower = {"p0": 1.0, "p1": 1.0, "p2": 2.0, "p3": 2.0}
    stay_s = run.priced().iteration_s
    assert run.go(64)
    assert run.priced().iteration_s < 0.9 * stay_s


def test_a_dear_move_waits_until_it_has_cost_as_much_to_stay() -> None:
    moves = []
    for price_s in (0.0, 30.0):
        run = Run(1.0, 1.0, 0.5, 0.5, noise=0.005)
        run.watcher.moved(price_s)
        run.go(40)
        run.slower["p0"] = 1.6
        moves.append(run.go(400)[0].iteration)
    gain_s = run.watcher.glances[-1].price_s
    assert gain_s
    assert moves[1] > moves[0] + 5


def test_moves_that_do_not_bring_what_they_promise_become_rare() -> None:
    """Whoever computes the last stage is slow, which no price knows: every move promises much, and brings nothing."""
    run = Run(1.0, 1.0, 0.5, 0.5, noise=0.005)
    moves = []
    for _ in range(600):
        last = run.watcher.layout.stages[-1].processors
        run.slower = {name: 3.0 if name in last else 1.0 for name in run.slower}
        moves += [decision.iteration for decision in run.go(1)]
    assert 2 <= len(moves) <= 12, moves
    assert sum(iteration > 300 for iteration in moves) <= 1, moves


def test_networks_without_pieces_are_refused() -> None:
    run = Run(1.0, 1.0)
    with pytest.raises(PlanError, match="pieces"):
        StagedWatcher(cluster=run.machines, workload=Workload.mlp(3, 4, 2, samples=8), layout=run.watcher.layout)
