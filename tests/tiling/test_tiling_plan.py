"""`plan` from end to end: the baselines' shares, who is left out, and what is refused."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor
from tatami.errors import ClusterError, PlanError
from tatami.tiling import (
    DEFAULT_PLANNER,
    PLANNERS,
    AbstractCost,
    AbstractPlanner,
    AlphaBetaCost,
    Cost,
    GridPlanner,
    GridRevPlanner,
    Layout,
    PaperCost,
    Replica,
    compare,
    plan,
)
from tatami.tiling.speeds import at_paces
from tatami.workload import Block, Workload, linear_pair

pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to take")

PAPER = Workload.mlp(203, 80, 26, samples=1024)
EXAMPLE = Cluster.from_speeds([3.0, 1.0, 2.5, 1.5, 3.5, 2.0])


class ReplicasCost(AbstractCost):
    """Nothing is cheaper than `replicas` replicas."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def price(self, layout: Layout, *, cluster: Cluster, workload: Workload) -> Cost:  # noqa: ARG002
        return Cost(compute=abs(len(layout.replicas) - self.replicas), tensor_parallel=0.0, gradients=0.0, unit="s")


def test_method_h_as_in_the_papers_example() -> None:
    result = plan(GridPlanner(), cluster=EXAMPLE, workload=PAPER, cost=ReplicasCost(2))
    slow, fast = result.layout.replicas
    assert (slow.processors, fast.processors) == (("p1", "p3", "p5"), ("p2", "p0", "p4"))
    assert (slow.width, fast.width) == pytest.approx((1.0 / 3.5, 2.5 / 3.5))
    assert slow.heights == fast.heights == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_method_h_rev_as_in_the_papers_example() -> None:
    result = plan(GridRevPlanner(), cluster=EXAMPLE, workload=PAPER, cost=ReplicasCost(2))
    slow, fast = result.layout.replicas
    assert (slow.width, fast.width) == pytest.approx((1.0 / 3.5, 2.5 / 3.5))
    assert slow.heights == fast.heights == pytest.approx((1 / 4.5, 1.5 / 4.5, 2 / 4.5))


def test_even_gives_everybody_the_same_and_keeps_the_order_of_the_ranks() -> None:
    result = plan("even", cluster=EXAMPLE, workload=PAPER, cost=ReplicasCost(3))
    assert [replica.processors for replica in result.layout.replicas] == [("p0", "p1"), ("p2", "p3"), ("p4", "p5")]
    assert {tile.area for tile in result.tiling.tiles} == {341 * 40, 342 * 40}


def test_weighted_gives_samples_by_speed_and_all_units() -> None:
    tiling = plan("weighted", cluster=EXAMPLE, workload=PAPER.with_samples(1350)).tiling
    assert [tile.samples.size for tile in tiling.tiles] == [300, 100, 250, 150, 350, 200]
    assert {(tile.units.start, tile.units.stop) for tile in tiling.tiles} == {(0, 80)}


@pytest.mark.parametrize("size", [5, 7])
def test_a_prime_number_of_processors_leaves_a_grid_one_replica_or_n(size: int) -> None:
    for name in ("even", "grid", "grid-rev"):
        assert len(plan(name, cluster=Cluster.from_speeds([1.0] * size), workload=PAPER).layout.replicas) in (1, size)


def test_the_best_number_of_replicas_is_that_of_the_given_cost() -> None:
    by_paper = plan("even", cluster=Cluster.from_speeds([1.0] * 6), workload=PAPER, cost=PaperCost())
    assert len(by_paper.layout.replicas) == 2
    assert by_paper.predicted.unit == "s"


REPEATING = Workload(
    samples=1000, blocks=(linear_pair(64, 64, 64),), replicated_parameters=10**6, replicated_flop_per_sample=10**6
)
"""Like a network of which most is repeated by every rank of a replica."""


def test_the_default_is_the_planner_of_least_predicted_time() -> None:
    result = plan(cluster=EXAMPLE, workload=REPEATING)
    assert result.planner == DEFAULT_PLANNER == "timed"
    assert result == plan("timed", cluster=EXAMPLE, workload=REPEATING)
    assert result.predicted_s == min(each.predicted_s for each in compare(cluster=EXAMPLE, workload=REPEATING))


def test_it_is_told_where_equal_shares_are_predicted_to_be_faster() -> None:
    cluster = Cluster.from_speeds([1.0, 1.0, 0.9, 0.8])
    srpm, even, timed = compare(["srpm", "even", "timed"], cluster=cluster, workload=REPEATING)
    assert len(srpm.layout.replicas) == 1
    assert srpm.predicted_s > 2 * even.predicted_s
    with pytest.warns(UserWarning, match=r"srpm is predicted to take 1\.\d+ s an iteration, and even \d+ ms; planner='timed'"):
        assert plan("srpm", cluster=cluster, workload=REPEATING) == srpm
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan("timed", cluster=cluster, workload=REPEATING)
        plan("even", cluster=cluster, workload=REPEATING)
        compare(cluster=cluster, workload=REPEATING)
    assert timed.predicted_s <= even.predicted_s


def test_all_planners_side_by_side() -> None:
    plans = compare(cluster=EXAMPLE, workload=PAPER)
    assert (
        [one.planner for one in plans]
        == ["even", "grid", "grid-rev", "srpm", "srpm-merged", "weighted", "timed"]
        == list(PLANNERS)
    )
    assert [one.planner for one in compare(["srpm", "even"], cluster=EXAMPLE, workload=PAPER)] == ["srpm", "even"]
    for one in plans:
        assert one.predicted == AlphaBetaCost().price(one.layout, cluster=EXAMPLE, workload=PAPER)
        assert one.t_comm == PaperCost().price(one.layout, cluster=EXAMPLE, workload=PAPER).total
        assert one.gap == pytest.approx(one.predicted_s / one.bound_s - 1)


@pytest.mark.parametrize("name", list(PLANNERS))
@given(speeds=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8), samples=st.integers(8, 60), units=st.integers(8, 60))
@settings(max_examples=30, deadline=None)
def test_every_planner_covers_the_floor_and_nobody_is_empty(name: str, speeds: list[float], samples: int, units: int) -> None:
    blocks = (linear_pair(7, units, 3), linear_pair(3, max(2, units // 3), 5, input_gradient=True))
    workload = Workload(samples=samples, blocks=blocks)
    cluster = Cluster.from_speeds(speeds)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = plan(name, cluster=cluster, workload=workload)
    assert any("leaves out" in str(each.message) for each in caught) == bool(result.left_out)
    for tiling in result.tilings():
        assert sum(tile.area for tile in tiling.tiles) == tiling.samples * tiling.units
        assert {tile.processor for tile in tiling.tiles} | set(result.left_out) == {f"p{i}" for i in range(len(speeds))}
    with_work = {tile.processor for tiling in result.tilings() for tile in tiling.tiles if tile.area}
    assert with_work == set(result.layout.processors)
    assert result == plan(name, cluster=cluster, workload=workload) if not result.left_out else True


@pytest.mark.parametrize("name", ["srpm", "srpm-merged", "weighted", "grid-rev"])
def test_a_processor_that_is_too_slow_is_left_out_by_name(name: str) -> None:
    cluster = Cluster.from_speeds([1.0, 1e-6, 2.0])
    with pytest.warns(UserWarning, match=f"{name} leaves out p1: too slow for one of 1024 samples and one of 80 units"):
        result = plan(name, cluster=cluster, workload=PAPER)
    assert result.left_out == ("p1",)
    assert {tile.processor for tile in result.tiling.tiles} == {"p0", "p2"}


def test_the_slowest_go_first() -> None:
    cluster = Cluster.from_speeds([1.0, 2e-6, 1e-6, 1.0])
    with pytest.warns(UserWarning, match="leaves out p2, p1"):
        assert plan("weighted", cluster=cluster, workload=PAPER).left_out == ("p2", "p1")


MESSAGES_TAKE = 20e-3
"""Of one on a hundredth of a core, where it takes 0.2 ms of a whole one."""


def odd_pile(*cores: float, known: bool = True) -> Cluster:
    """Hosts with so many cores each, and what messages cost them."""
    processors = (
        Processor(
            name=f"p{rank}",
            speed=5e10 * share,
            host=f"h{rank}",
            message_s=0.01 / share * MESSAGES_TAKE if known else 0.0,
            copy_bytes_per_s=1e9 * share if known else float("inf"),
        )
        for rank, share in enumerate(cores)
    )
    return Cluster(processors=tuple(processors))


WIDE = Workload.mlp(203, 800, 26, samples=16384)


def test_machines_whose_messages_take_longer_than_their_work_saves_are_left_out_together() -> None:
    cluster = odd_pile(0.02, 0.4, 0.02, 0.4, 0.4)
    with pytest.warns(UserWarning, match="timed leaves out p[02], p[02]: an iteration is predicted to be shorter without"):
        result = plan(cluster=cluster, workload=WIDE)
    assert set(result.left_out) == {"p0", "p2"}
    alone = plan(cluster=odd_pile(0.4, 0.4, 0.4), workload=WIDE)
    assert result.predicted_s == pytest.approx(alone.predicted_s)
    # One of the two would keep the others waiting as both do.
    for cores in ((0.02, 0.4, 0.4, 0.4), (0.02, 0.4, 0.02, 0.4, 0.4)):
        assert plan("weighted", cluster=odd_pile(*cores), workload=WIDE).predicted_s > 1.5 * alone.predicted_s
    # Who asks for a method by name gets all; and where it was not measured what messages cost, none is left out.
    assert plan("srpm", cluster=cluster, workload=WIDE).left_out == ()
    assert plan(cluster=odd_pile(0.02, 0.4, 0.02, 0.4, 0.4, known=False), workload=WIDE).left_out == ()


@given(cores=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=9), samples=st.sampled_from([512, 16384]))
@settings(max_examples=40, deadline=None)
def test_who_is_left_out_makes_an_iteration_shorter(cores: list[float], samples: int) -> None:
    workload = WIDE.with_samples(samples)
    cluster = odd_pile(*cores)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, *others = compare(["timed", "weighted", "srpm", "even"], cluster=cluster, workload=workload)
    assert all(result.predicted_s <= other.predicted_s * (1 + 1e-9) for other in others)
    assert {tile.processor for tile in result.tiling.tiles} | set(result.left_out) == set(cluster.by_name)
    if result.left_out:
        assert min(cluster.message_s[name] for name in result.left_out) >= max(
            cluster.message_s[name] for name in result.layout.processors
        )


def test_a_slower_machine_is_slower_at_messages() -> None:
    measured = odd_pile(0.1, 0.4)
    cluster = replace(measured, processors=tuple(replace(each, call_s=1e-3, step_s=5e-3) for each in measured.processors))
    slowed = at_paces(cluster, {"p0": 0.25, "p1": 1.0})
    assert (slowed.by_name["p0"].call_s, slowed.by_name["p0"].step_s) == pytest.approx((4e-3, 20e-3))
    assert slowed.by_name["p1"] == cluster.by_name["p1"]
    assert slowed.by_name["p0"].message_s == pytest.approx(4 * cluster.by_name["p0"].message_s)
    assert slowed.by_name["p0"].copy_bytes_per_s == pytest.approx(cluster.by_name["p0"].copy_bytes_per_s / 4)
    assert slowed.speeds == cluster.speeds
    unknown = odd_pile(0.1, 0.4, known=False)
    assert at_paces(unknown, {"p0": 0.25, "p1": 1.0}) is unknown


def test_a_replica_may_be_deeper_than_a_block_has_units() -> None:
    blocks = (linear_pair(9, 100, 2), linear_pair(2, 2, 9, input_gradient=True))
    workload = Workload(samples=4, blocks=blocks)
    result = plan("srpm", cluster=Cluster.from_speeds([1.0] * 4), workload=workload)
    assert [len(replica.processors) for replica in result.layout.replicas] == [4]
    assert result.left_out == ()
    wide, narrow = result.tilings()
    assert [tile.units.size for tile in wide.tiles] == [25] * 4
    assert [tile.units.size for tile in narrow.tiles] == [1, 1, 0, 0]


@pytest.mark.parametrize("name", list(PLANNERS))
def test_more_processors_than_units_are_laid_in_replicas(name: str) -> None:
    result = plan(name, cluster=Cluster.from_speeds([1.0, 0.5] * 50), workload=PAPER)
    assert result.left_out == ()
    assert sum(tile.area for tile in result.tiling.tiles) == 1024 * 80
    assert min(tile.area for tile in result.tiling.tiles) > 0


@pytest.mark.parametrize("name", list(PLANNERS))
@given(
    speeds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7),
    samples=st.integers(7, 40),
    heads=st.integers(1, 6),
    hidden=st.integers(1, 60),
    trained=st.integers(0, 90),
    repeated=st.sampled_from([0, 10_000, 1_000_000]),
)
@settings(max_examples=20, deadline=None)
@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_coarse_blocks_are_covered_and_no_plan_beats_the_bounds(
    name: str, speeds: list[float], samples: int, heads: int, hidden: int, trained: int, repeated: int
) -> None:
    attention = Block(units=heads, unit_parameters=trained, forward_elements=40, backward_elements=40, flop_per_unit=3e5)
    mlp = Block(units=hidden, unit_parameters=20, forward_elements=40, flop_per_unit=5e3, flop_per_sample=2e3)
    workload = Workload(
        samples=samples, blocks=(attention, mlp) * 3, replicated_parameters=100, replicated_flop_per_sample=repeated
    )
    result = plan(name, cluster=Cluster.from_speeds(speeds), workload=workload)
    assert result.gap >= -1e-9
    tilings = result.tilings()
    assert [tiling.units for tiling in tilings] == [heads, hidden] * 3
    for tiling in tilings:
        assert sum(tile.area for tile in tiling.tiles) == samples * tiling.units
    with_work = {tile.processor for tiling in tilings for tile in tiling.tiles if tile.area}
    assert with_work == set(result.layout.processors)
    assert with_work | set(result.left_out) == {f"p{index}" for index in range(len(speeds))}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("repeated_fraction", [0.1, 0.5, 0.9])
def test_the_bound_counts_repeated_work_of_frozen_networks(ranks: int, repeated_fraction: float) -> None:
    """An adapter of few weights on a frozen network sends next to nothing, so weighted replicas are as fast as can be."""
    frozen = Block(units=256, unit_parameters=0, forward_elements=2048, backward_elements=2048, flop_per_unit=16_448.0)
    split = 4 * frozen.flop(units=256, samples=1)
    workload = Workload(
        samples=32 * ranks,
        blocks=(replace(frozen, unit_parameters=8), *[frozen] * 3),
        replicated_parameters=4_000,
        replicated_flop_per_sample=round(split * repeated_fraction / (1 - repeated_fraction)),
    )
    machines = tuple(Processor(name=f"p{rank}", host=f"host{rank}", speed=1e9) for rank in range(ranks))
    network = Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6)
    result = plan(cluster=Cluster(processors=machines, network=network), workload=workload)
    assert result.bound_s >= workload.flop(width=1.0, height=1.0) / 1e9 / ranks
    assert 0 <= result.gap < 0.02


@pytest.mark.parametrize("name", list(PLANNERS))
def test_a_network_without_blocks_is_laid_in_replicas_of_one(name: str) -> None:
    workload = Workload(samples=90, replicated_parameters=1000, replicated_flop_per_sample=5000)
    result = plan(name, cluster=Cluster.from_speeds([1.0, 2.0, 3.0]), workload=workload)
    assert sorted(replica.processors for replica in result.layout.replicas) == [("p0",), ("p1",), ("p2",)]
    assert result.tilings() == ()
    if name in ("srpm", "weighted", "timed"):
        sizes = {tile.processor: tile.samples.size for tile in result.tiling.tiles}
        assert sizes == {"p0": 15, "p1": 30, "p2": 45}
        assert result.predicted.compute == pytest.approx(15 * 5000 / 1e9)
    assert result.t_comm == 2 * 1000 * 2
    assert (result.volume_bytes, result.predicted.tensor_parallel) == (0, 0)
    assert 0 <= result.gap < 2


def test_a_network_without_blocks_on_one_processor() -> None:
    workload = Workload(samples=90, replicated_parameters=1000, replicated_flop_per_sample=5000)
    for result in compare(cluster=Cluster.from_speeds([1.0]), workload=workload):
        assert result.predicted_s == result.bound_s == pytest.approx(90 * 5000 / 1e9)


def test_speeds_by_name_and_by_rank() -> None:
    cluster = Cluster(processors=tuple(Processor(name=name, speed=1.0) for name in ("old", "new")))
    by_name = plan("weighted", cluster=cluster, workload=PAPER, speeds={"new": 3.0, "old": 1.0})
    assert by_name == plan("weighted", cluster=cluster, workload=PAPER, speeds=[1.0, 3.0])
    assert by_name.tiling.by_processor["new"].samples.size == 768


@pytest.mark.parametrize(
    ("speed", "problem"),
    [
        (0.0, "must be > 0, not 0"),
        (-1.0, "must be > 0, not -1"),
        (float("nan"), "must be a finite number > 0, not nan"),
        (float("inf"), "must be a finite number > 0, not inf"),
        ("2", "must be a number > 0, not '2'"),
    ],
)
def test_speeds_that_cannot_be_are_refused(speed: Any, problem: str) -> None:
    cluster = Cluster.from_speeds([1.0, 1.0])
    with pytest.raises(PlanError, match=rf"^speeds must be a number > 0 for each processor, .* names; speeds\[1\] {problem}$"):
        plan("srpm", cluster=cluster, workload=PAPER, speeds=[1.0, speed])
    with pytest.raises(PlanError, match=f"^the speed of p1 {problem}$"):
        plan("srpm", cluster=cluster, workload=PAPER, speeds={"p0": 1.0, "p1": speed})
    with pytest.raises(ClusterError, match=rf"^speeds must be a number > 0 for each rank; speeds\[1\] {problem}$"):
        Cluster.from_speeds([1.0, speed])


def test_speeds_that_are_missing_or_too_many_are_refused() -> None:
    cluster = Cluster.from_speeds([1.0, 1.0])
    with pytest.raises(PlanError, match="3 speeds for 2 processors"):
        plan("srpm", cluster=cluster, workload=PAPER, speeds=[1.0, 1.0, 1.0])
    with pytest.raises(PlanError, match=r"missing \['p1'\], unknown \['x'\]"):
        plan("srpm", cluster=cluster, workload=PAPER, speeds={"p0": 1.0, "x": 1.0})
    with pytest.raises(PlanError, match=r"by the processors' names, not 'equal'$"):
        plan("srpm", cluster=cluster, workload=PAPER, speeds="equal")  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match=r"^speeds must be a number > 0 for each rank, not \[\]$"):
        Cluster.from_speeds([])


@pytest.mark.parametrize("planner", PLANNERS)
def test_of_more_processors_than_samples_some_share_a_sample_or_are_left_out(planner: str) -> None:
    cluster = Cluster.from_speeds([1.0] * 9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = plan(planner, cluster=cluster, workload=PAPER.with_samples(2))
    assert found.layout.sample_sizes(2) in [(2,), (1, 1)]
    assert not found.layout.empty(found.workload)
    if planner == "weighted":
        assert found.left_out == tuple(f"p{rank}" for rank in (2, 3, 4, 5, 6, 7, 8))
        assert "weighted leaves out p2" in str(told[0].message)


class ForgetfulPlanner(AbstractPlanner):
    """Lays out the first processor alone."""

    name: ClassVar[str] = "forgetful"

    def layout(self, *, cluster: Cluster, workload: Workload, cost: AbstractCost) -> Layout:  # noqa: ARG002
        return Layout(replicas=(Replica(width=1.0, processors=(cluster.processors[0].name,), heights=(1.0,)),))


def test_a_planner_of_ones_own_must_lay_out_everybody() -> None:
    assert plan(ForgetfulPlanner(), cluster=Cluster.from_speeds([1.0]), workload=PAPER).planner == "forgetful"
    with pytest.raises(PlanError, match=r"'forgetful' must lay out every processor .* \['p1'\]"):
        plan(ForgetfulPlanner(), cluster=Cluster.from_speeds([1.0, 1.0]), workload=PAPER)


def test_an_unknown_planner_is_refused_with_the_choices() -> None:
    with pytest.raises(
        PlanError, match="no planner 'magic'; choose one of even, grid, grid-rev, srpm, srpm-merged, weighted, timed"
    ):
        plan("magic", cluster=EXAMPLE, workload=PAPER)


CONDITIONS = {"A": (0.25, 0.31, 0.63, 1.0, 1.0, 0.42, 0.67, 0.63), "B": (0.63, 0.63, 0.63, 1.0, 0.63, 1.0, 1.0, 0.63)}
GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "golden_plans.json").read_text())


@pytest.mark.parametrize("name", list(GOLDEN))
def test_plans_are_as_they_were(name: str) -> None:
    """Of equal plans `timed` may take any; where it lies is no part of the record."""
    condition, planner = name.split()
    cluster = Cluster.from_speeds(CONDITIONS[condition[0]][: int(condition[1:])])
    result = plan(planner, cluster=cluster, workload=Workload.mlp(203, 80, 26, samples=1024))
    golden = GOLDEN[name]
    assert result.t_comm == golden["t_comm"]
    assert result.predicted_s == pytest.approx(golden["predicted_s"], rel=1e-14)
    if "replicas" in golden:
        replicas = [
            [replica[0].samples.size, {tile.processor: tile.units.size for tile in replica}]
            for replica in result.tiling.replicas
        ]
        assert replicas == golden["replicas"]
