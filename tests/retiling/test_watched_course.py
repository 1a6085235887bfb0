"""Whole courses in which machines become slow and recover, against one that is told each change when it can be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tatami.cluster import Cluster, Link, Processor
from tatami.retiling import Retiler, Watcher
from tatami.retiling.columns import works_of
from tatami.retiling.watching import Found
from tatami.tiling import AlphaBetaCost, Layout, plan
from tatami.workload import Workload

SPEEDS = 2e10 * np.array((0.25, 0.31, 0.63, 1.0, 1.0, 0.42, 0.67, 0.63))
NETWORK = Workload.mlp(203, 800, 26, samples=16384)
CLUSTER = Cluster(
    processors=tuple(Processor(name=f"p{rank}", speed=speed, host=f"h{rank}") for rank, speed in enumerate(SPEEDS)),
    network=Link(bandwidth_bytes_per_s=1.25e8, latency_s=5e-5),
)
TRACES = (((33, 4, 1.5), (53, 4, 1.0), (73, 1, 4.0)), ((41, 6, 4.0), (61, 6, 1.0)), ((22, 0, 1.5), (42, 0, 1.0), (70, 2, 2.0)))
"""Each change: after which iteration, who, and how many times as slow as at first."""
ITERATIONS, NOISE, LATE = 120, 0.1, 4
LOOK_S, MOVE_S = 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class Course:
    total_s: float
    looks: int
    moves: int


def iteration_s(layout: Layout, slower: np.ndarray) -> float:
    works = works_of(layout, workload=NETWORK)
    price = AlphaBetaCost(flop_per_s=1.0).price(layout, cluster=CLUSTER, workload=NETWORK)
    flop = NETWORK.work_flop * np.array([works.get(f"p{rank}", 0.0) for rank in range(8)])
    compute_s = float((flop * slower / SPEEDS).max())
    return compute_s + price.vertical + price.horizontal


def told(trace: tuple[tuple[int, int, float], ...]) -> float:
    """Seconds where each change is told, and acted on, as late as it is noticed at this noise; its moves cost as much."""
    slower, known = np.ones(8), np.ones(8)
    layout, total_s = plan(cluster=CLUSTER, workload=NETWORK).layout, 0.0
    for iteration in range(1, ITERATIONS + 1):
        total_s += iteration_s(layout, slower)
        for after, rank, factor in trace:
            if iteration == after:
                slower[rank] = factor
            if iteration == after + LATE:
                known[rank] = factor
                own = tuple(replace(one, speed=s / k) for one, s, k in zip(CLUSTER.processors, SPEEDS, known, strict=True))
                layout = plan(cluster=replace(CLUSTER, processors=own), workload=NETWORK).layout
                total_s += MOVE_S
    return total_s


def watched(trace: tuple[tuple[int, int, float], ...], *, seed: int) -> Course:
    random, slower = np.random.default_rng(seed), np.ones(8)
    layout = plan(cluster=CLUSTER, workload=NETWORK).layout
    watcher = Watcher(Retiler(), cluster=CLUSTER, workload=NETWORK, layout=layout, known_speeds=True)
    total_s, looks, moves = 0.0, 0, 0

    def planned(leader: str, compute: Callable[[], Found]) -> tuple[Found, float]:  # noqa: ARG001
        nonlocal looks
        looks += 1
        return compute(), LOOK_S

    watcher.planned = planned
    for iteration in range(1, ITERATIONS + 1):
        total_s += iteration_s(watcher.layout, slower)
        values = slower * np.exp(NOISE * random.standard_normal(8)) * NETWORK.work_flop / SPEEDS
        decision = watcher.take(iteration, values)
        if decision is not None and decision.remaps:
            moves += 1
            watcher.moved(MOVE_S)
        for after, rank, factor in trace:
            if iteration == after:
                slower[rank] = factor
    return Course(total_s=total_s + LOOK_S * looks + MOVE_S * moves, looks=looks - moves, moves=moves)


def test_courses_take_little_more_than_if_all_were_told_that_is_noticed() -> None:
    courses = [(watched(trace, seed=seed), told(trace)) for trace in TRACES for seed in range(2)]
    assert sum(course.total_s for course, _ in courses) < 1.07 * sum(best_s for _, best_s in courses)
    assert max(course.looks for course, _ in courses) <= 12
    assert max(course.moves for course, _ in courses) <= 5
