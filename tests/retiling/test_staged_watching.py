"""Other stages when machines change: a calm run is left alone, a slower machine is given less, and moving has its price."""

import numpy as np
import pytest

from tatami.cluster import Cluster, Link, Processor
from tatami.errors import PlanError
from tatami.retiling import StagedDecision, StagedWatcher
from tatami.tiling import StagedPlan, plan_stages, price_stages
from tatami.workload import Piece, Workload

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

    def go(self, iterations: int) -> list[StagedDecision]:
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
