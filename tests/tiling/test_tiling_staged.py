"""Replicas of pipeline stages: compared with all possible ones, and prices by hand."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor, SpeedTable
from tatami.errors import PlanError
from tatami.tiling import AlphaBetaCost, Layout, Replica, StagedLayout, StagedPlan, plan, price_stages
from tatami.tiling.pipeline import EXACT, PipelineStage, PipelineTask, best_pipeline
from tatami.tiling.staged import _Search, choose, plan_stages
from tatami.workload import Piece, Workload, gpt_workload

_LARGEST_REGRET = {False: 0.02, True: 0.1}
"""Without memory limits and with them."""


def _cluster(seed: int, *, machines: int, limited: bool = False) -> Cluster:
    """Speeds within a factor of ten, a link of its own between each two hosts."""
    rng = np.random.default_rng(seed)
    return Cluster(
        processors=tuple(
            Processor(
                name=f"p{index}",
                speed=float(10 ** rng.uniform(9, 10)),
                memory_bytes=int(rng.uniform(0.3, 3) * 2**20) if limited else None,
                message_s=float(rng.choice([0.0, 1e-4])),
            )
            for index in range(machines)
        ),
        links={
            (f"p{one}", f"p{other}"): Link(bandwidth_bytes_per_s=float(10 ** rng.uniform(6, 8.5)), latency_s=1e-4)
            for one, other in itertools.combinations(range(machines), 2)
        },
    )


def _gpt(samples: int = 12, **changed: Any) -> Workload:
    sizes = {"layers": 2, "width": 64, "heads": 4, "tokens": 16, "vocabulary": 128, "samples": samples, "tied": False}
    return gpt_workload(**(sizes | changed))


def _plain(flop: list[float], *, crossing_bytes: float, samples: int, parameters: int = 0) -> Workload:
    pieces = [
        Piece(
            name=f"{index}",
            flop_per_sample=own,
            parameters=parameters,
            activation_bytes_per_sample=10.0,
            crossing_bytes_per_sample=crossing_bytes if index else 0.0,
        )
        for index, own in enumerate(flop)
    ]
    return Workload(samples=samples, replicated_flop_per_sample=round(sum(flop)), pieces=tuple(pieces))


def _layout(*stages: tuple[str, ...], cuts: tuple[int, ...], widths: tuple[float, ...], micro_batches: int) -> StagedLayout:
    return StagedLayout(
        stages=tuple(
            Layout(
                replicas=tuple(
                    Replica(width=width, processors=(name,), heights=(1.0,), micro_batches=micro_batches)
                    for name, width in zip(names, widths, strict=True)
                )
            )
            for names in stages
        ),
        cuts=cuts,
    )


@pytest.mark.parametrize(
    ("machines", "limited", "tied"), [(6, False, False), (5, True, True), (5, True, False), (3, False, True)]
)
def test_little_is_lost_against_all_pipelines_there_are(*, machines: int, limited: bool, tied: bool) -> None:
    workload = _gpt(tied=tied)
    for seed in range(4):
        cluster = _cluster(seed, machines=machines, limited=limited)
        search = _Search(cluster, workload, AlphaBetaCost(), None, None)
        least_s = math.inf
        for micro_batches in range(1, workload.samples + 1):
            task = search._task(np.arange(machines)[:, None], [workload.samples], micro_batches, search.speeds)
            for count in range(2, min(machines, task.num_pieces) + 1):
                orders = np.array(list(itertools.permutations(range(machines), count)))
                for cuts in itertools.combinations(range(1, task.num_pieces), count - 1):
                    edges = np.tile([0, *cuts, task.num_pieces], (len(orders), 1))
                    times = task.times_s(orders, edges)
                    at = int(times.argmin())
                    if times[at] < least_s:
                        least_s, best = float(times[at]), (orders[at], cuts, micro_batches)
        found = plan_stages(cluster, workload)
        if found is None:
            assert math.isinf(least_s)
            continue
        assert found.fits
        assert found.iteration_s <= least_s * (1 + _LARGEST_REGRET[limited])
        order, cuts, micro_batches = best
        names = [(f"p{machine}",) for machine in order]
        layout = _layout(*names, cuts=cuts, widths=(1.0,), micro_batches=micro_batches)
        priced = price_stages(layout, cluster=cluster, workload=workload)
        assert priced.iteration_s == pytest.approx(least_s), "what the search sees is the price"
        assert priced.fits


@pytest.mark.parametrize(("third", "taken"), [(0.04, 2), (0.2, 3)])
def test_a_machine_more_has_to_make_it_clearly_faster(third: float, taken: int) -> None:
    """A third stage on a machine of a twenty-fifth of both others' speed would save 2 % of the time."""
    machines = Cluster(
        processors=tuple(Processor(name=f"p{place}", speed=speed * 1e9) for place, speed in enumerate((1, 1, third))),
        network=Link(bandwidth_bytes_per_s=1e12, latency_s=0.0),
    )
    workload = _plain([1e6] * 102, crossing_bytes=1.0, samples=64)
    found, three = plan_stages(machines, workload), plan_stages(machines, workload, stages=3)
    assert found is not None
    assert three is not None
    assert (three.iteration_s < found.iteration_s, len(found.layout.processors)) == (taken == 2, taken)


def test_a_price_by_hand() -> None:
    """Two stages of 2 and 3 s for each micro-batch, 1 s for each hand-over, four micro-batches."""
    machines = Cluster(
        processors=(Processor(name="a", speed=10.0, memory_bytes=1000), Processor(name="b", speed=10.0)),
        network=Link(bandwidth_bytes_per_s=8.0, latency_s=0.5),
    )
    layout = _layout(("a",), ("b",), cuts=(2,), widths=(1.0,), micro_batches=4)
    workload = _plain([5, 5, 10, 5], crossing_bytes=2.0, samples=8)
    cost = AlphaBetaCost(flop_per_s=1.0)

    def priced(**asked: Any) -> StagedPlan:
        found = price_stages(layout, cluster=machines, workload=asked.pop("workload", workload), cost=cost, **asked)
        assert sum(seconds for _, seconds in found.parts_s) == pytest.approx(found.iteration_s)
        for rank in found.ranks:
            assert rank.total_s == pytest.approx(found.iteration_s)
        return found

    found = priced()
    assert found.iteration_s == pytest.approx((2 + 3) + 2 * 1 + 3 * 3)
    # The gradient of a's first micro-batch is back after 2 + 1 + 3 + 1 s: three are in flight to keep b busy.
    assert found.in_flight == (3, 1)
    first, last = found.ranks
    assert (first.compute_s, first.handover_s, first.exposed_s, first.wait_s) == pytest.approx((8, 8, 2, 6))
    assert (last.compute_s, last.exposed_s, last.wait_s) == pytest.approx((12, 2, 2))
    assert (first.memory_bytes, last.memory_bytes) == (3 * 2 * 2 * 10, 2 * 2 * 10)
    # Where memory holds two micro-batches only, hand-overs are not hidden: two in 7 s.
    machines = replace(machines, processors=(replace(machines.processors[0], memory_bytes=100), machines.processors[1]))
    assert priced().in_flight == (2, 1)
    assert priced().iteration_s == pytest.approx(5 + 2 + 3 * 3.5)
    assert priced().fits
    # A weight of 40 bytes that both read: its gradients are swapped when a is done, which is last.
    ends = [replace(workload.pieces[at], parameters=10, shared=(("w", 10),)) for at in (0, 3)]
    tied = replace(workload, pieces=(ends[0], *workload.pieces[1:3], ends[1]), state_bytes_per_parameter=0.0)
    assert priced(workload=tied).iteration_s == pytest.approx(5 + 2 + 3 * 3.5 + 40 / 8 + 0.5)


def test_replicas_share_samples_by_speed_and_sum_the_gradients_of_their_stage() -> None:
    processors = [Processor(name=f"{host}{index}", host=host, speed=1e9) for host in "xy" for index in (0, 1)]
    machines = Cluster(processors=tuple(processors), network=Link(bandwidth_bytes_per_s=1e6, latency_s=0.0))
    # A piece of very many parameters, so that sums must stay inside of hosts; one of few samples for each micro-batch.
    workload = _plain([1e9, 1e9], crossing_bytes=1e3, samples=64, parameters=10**6)
    found = plan_stages(machines, workload, stages=2, micro_batches=16)
    assert found is not None
    assert found.layout.num_replicas == 2
    assert [{name[0] for name in stage.processors} for stage in found.layout.stages] in ([{"x"}, {"y"}], [{"y"}, {"x"}])
    assert "x0" in found.layout.stages[-1].processors, "rank 0 has the loss where that costs nothing"
    assert {rank.samples for rank in found.ranks} == {32}
    assert all(rank.gradients_s > 0 for rank in found.ranks)
    slower = [replace(each, speed=0.5e9) if each.name.endswith("1") else each for each in processors]
    found = plan_stages(replace(machines, processors=tuple(slower)), workload, stages=2, micro_batches=16)
    assert found is not None
    assert [replica.width for replica in found.layout.stages[0].replicas] == pytest.approx([43 / 64, 21 / 64])


def test_a_sharded_optimizer_makes_room_for_replicas_of_stages() -> None:
    """Four machines that hold about half of the network each."""
    workload = _gpt(width=1024, vocabulary=8192, layers=6, tied=True)
    sharded = workload.with_sharded_optimizer
    state_bytes = sharded.replicated_parameters * 20
    memories = (0.55, 0.47, 0.55, 0.55)
    processors = (
        Processor(name=f"p{i}", speed=1e12, memory_bytes=round(each * state_bytes)) for i, each in enumerate(memories)
    )
    slow = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-4)
    cluster = Cluster(processors=tuple(processors), network=slow)
    layout = _layout(("p0", "p1"), ("p2", "p3"), cuts=(8,), widths=(0.5, 0.5), micro_batches=6)
    assert not price_stages(layout, cluster=cluster, workload=workload).fits
    priced = price_stages(layout, cluster=cluster, workload=sharded)
    assert priced.fits
    shares = priced.optimizer_shares
    for stage in layout.stages:
        assert sum(shares[name] for name in stage.processors) == pytest.approx(1.0)
    assert shares["p1"] < shares["p0"]
    assert plan_stages(cluster, workload, stages=2) is None
    found = plan_stages(cluster, sharded, stages=2)
    assert found is not None
    assert found.fits
    assert found.layout.num_replicas == 2


def test_speeds_by_size_and_batch_statistics() -> None:
    table = SpeedTable([(1e6, 1e9), (1e9, 1e11)])
    machines = Cluster(processors=(Processor(name="a", speed=table), Processor(name="b", speed=table)))
    found = plan_stages(machines, _gpt(samples=64))
    assert found is not None
    assert max(rank.micro_batches for rank in found.ranks) < 64, "small micro-batches are slow"
    normed = replace(_gpt(), batch_statistics=(65,))
    found = plan_stages(machines, normed)
    assert found is not None
    assert {rank.micro_batches for rank in found.ranks} == {1}
    with pytest.raises(PlanError, match="batch normalization"):
        plan_stages(machines, normed, micro_batches=2)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"stages": 1}, "at least 2 stages, not 1"),
        ({"stages": 4}, "4 stages are more than the 3 machines: take at most 3"),
        ({"stages": 7}, "7 stages are more than the 6 pieces of this network: take at most 6"),
        ({"micro_batches": 13}, "13 micro-batches are more than the 12 samples: take at most 12"),
        ({"micro_batches": 0}, "at least 1 micro-batch, not 0"),
    ],
)
def test_what_cannot_be_is_one_sentence(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        plan_stages(_cluster(0, machines=3), _gpt(), **asked)


def test_stages_are_chosen_where_they_are_faster_or_nothing_else_fits() -> None:
    machines = Cluster(processors=tuple(Processor(name=f"p{index}", speed=1e12) for index in range(4)))
    workload = gpt_workload(layers=4, width=512, heads=8, tokens=128, samples=64, vocabulary=1000)
    staged, other = plan_stages(machines, workload), plan(cluster=machines, workload=workload)
    assert staged is not None
    assert staged.iteration_s < other.predicted_s / 1.03
    assert choose(other, staged) is staged
    assert choose(None, staged) is staged
    assert choose(other, None) is other
    assert choose(other, replace(staged, iteration_s=other.predicted_s / 1.02)) is other
    assert choose(other, replace(staged, is_measured=False)) is other
    assert plan_stages(machines, replace(workload, pieces=())) is None
    assert plan_stages(machines.only(["p0"]), workload) is None
    short = tuple(replace(each, memory_bytes=2**20) for each in machines.processors)
    assert plan_stages(replace(machines, processors=short), workload) is None
    for stages in (2, 3):
        found = plan_stages(machines, workload, stages=stages, micro_batches=6)
        assert found is not None
        assert len(found.layout.stages) == stages
        assert {rank.micro_batches for rank in found.ranks} == {6}


def test_only_stages_that_hold_the_largest_weight_need_room_to_update_it() -> None:
    """A vocabulary of which two copies of 4 MiB, with Adam's 32 MiB of state and update, are the most of the network."""
    workload = _gpt(width=256, vocabulary=4096, tied=True)
    table_bytes = 4 * 256 * 4096
    for size_bytes, fits in ((7.5 * table_bytes, True), (6.9 * table_bytes, False)):
        cluster = Cluster(
            processors=tuple(Processor(name=f"p{index}", speed=1.0, memory_bytes=round(size_bytes)) for index in range(4))
        )
        found = plan_stages(cluster, workload, stages=4)
        assert (found is not None) == fits
        if found is not None:
            kept_bytes = [rank.memory_bytes for rank in found.ranks]
            assert min(kept_bytes[0], kept_bytes[-1]) >= (5 + 2) * table_bytes
            assert max(kept_bytes[1:-1]) < 5 * table_bytes
            assert max(kept_bytes) <= size_bytes


def test_pieces_without_weights_need_no_room_to_update_any() -> None:
    """A small network behind one large weight outside of blocks, and activations between its layers."""
    sizes = (10**6, 0, 1000, 0, 1000)
    pieces = tuple(
        Piece(name=f"{at}", flop_per_sample=1e6, parameters=own, largest_parameters=own) for at, own in enumerate(sizes)
    )
    workload = Workload(
        samples=4,
        replicated_flop_per_sample=5 * 10**6,
        replicated_parameters=sum(sizes),
        update_bytes_per_parameter=8.0,
        largest_parameters=10**6,
        pieces=pieces,
    )
    machines = (Processor(name="p0", speed=1.0, memory_bytes=29 * 10**6), Processor(name="p1", speed=1.0, memory_bytes=10**6))
    found = plan_stages(Cluster(processors=machines), workload, stages=2)
    assert found is not None
    assert {rank.processor: rank.memory_bytes for rank in found.ranks} == pytest.approx({"p0": 28e6, "p1": 28e3}, rel=0.01)


def _hosts(*speeds: float, each: int, memory_bytes: int | None = None) -> Cluster:
    """Hosts of several ranks of the same speed, and a slow network between hosts."""
    processors = [
        Processor(name=f"p{index}", host=f"h{index // each}", speed=speed, memory_bytes=memory_bytes)
        for index, speed in enumerate(np.repeat(speeds, each).tolist())
    ]
    local, network = Link(bandwidth_bytes_per_s=2e11, latency_s=1e-5), Link(bandwidth_bytes_per_s=1.25e8, latency_s=5e-5)
    return Cluster(processors=tuple(processors), local=local, network=network)


def test_a_stage_of_several_ranks_by_hand() -> None:
    """Two ranks of a host share a stage: each has half of its two blocks. Four micro-batches of two samples."""
    workload, cluster = _gpt(samples=8, width=256, tokens=64), _hosts(1e9, 1e9, each=2)
    alone = _layout(("p0",), ("p2",), cuts=(3,), widths=(1.0,), micro_batches=4)
    pair = Layout(replicas=(replace(alone.stages[0].replicas[0], processors=("p0", "p1"), heights=(0.5, 0.5)),))
    shared = StagedLayout(stages=(pair, alone.stages[1]), cuts=(3,))
    found, other = (price_stages(layout, cluster=cluster, workload=workload) for layout in (shared, alone))
    split = 8 * sum(block.flop(units=block.units, samples=1) for block in workload.blocks[:2])
    whole = 8 * sum(piece.flop_per_sample for piece in workload.pieces[:3])
    first, last = found.ranks[0], found.ranks[-1]
    assert [first.compute_s, last.compute_s] == pytest.approx([(whole - split / 2) / 1e9, other.ranks[-1].compute_s])
    assert (first.units_fraction, last.units_fraction) == (0.5, 1.0)
    # Beside the hand-overs, in each micro-batch what crosses is passed on inside of the host, and there are four sums.
    crossing_bytes = 2 * workload.pieces[3].crossing_bytes_per_sample
    passed_s, crosses_s = crossing_bytes / 2e11 + 1e-5, crossing_bytes / 1.25e8 + 5e-5
    assert 4 * passed_s < first.exposed_s < 4 * (passed_s + 4 * 10 * passed_s) + 8 * crosses_s
    assert first.memory_bytes < 0.6 * other.ranks[0].memory_bytes
    with pytest.raises(PlanError, match="p0 and p1 are to share the units of stage 0, and no layer"):
        price_stages(replace(shared, cuts=(1,)), cluster=cluster, workload=workload)


def test_ranks_of_a_host_share_a_stage_where_memory_asks_for_it() -> None:
    workload = gpt_workload(layers=4, width=2048, heads=16, tokens=512, samples=32, vocabulary=3000)
    apart = replace(workload, pieces=tuple(replace(piece, blocks=()) for piece in workload.pieces))
    for memory_bytes, is_shared in ((None, False), (5 * 2**28, True)):
        cluster = _hosts(1e13, 5e12, each=4, memory_bytes=memory_bytes)
        found, alone = plan_stages(cluster, workload), plan_stages(cluster, apart)
        assert found is not None
        assert alone is not None
        assert found.fits
        replicas = [replica.processors for stage in found.layout.stages for replica in stage.replicas]
        assert any(len(names) > 1 for names in replicas) == is_shared
        assert all(len({cluster.host_of[name] for name in names}) == 1 for names in replicas)
        assert (found.iteration_s < alone.iteration_s) == is_shared


_REGRET_OF_PIPELINES = 0.15


def _task(seed: int, *, machines: int, pieces: int, limited: bool) -> PipelineTask:
    """Speeds and pieces within a factor of ten, links within four decades."""
    rng = np.random.default_rng(seed)
    work = 10 ** rng.uniform(0, 1, pieces)
    own = 10 ** rng.uniform(-1, 3, machines)
    return PipelineTask(
        work_s=work[None] / 10 ** rng.uniform(0, 1, machines)[:, None],
        step_s=rng.uniform(0, 0.1, machines),
        crossing_bytes=rng.choice([1.0, 1.0, 3.0, 2.0], pieces) * rng.uniform(0.5, 20),
        bandwidth_bytes_per_s=np.minimum(own[:, None], own[None]),
        latency_s=np.full((machines, machines), rng.choice([0.0, 0.1])),
        state_bytes=work,
        activation_bytes=work * 0.2,
        memory_bytes=rng.uniform(0.2, 1.5, machines) * work.sum() if limited else np.full(machines, math.inf),
        update_bytes=rng.choice([0.0, 0.5, 2.0], pieces) * work,
        micro_batches=int(rng.choice([1, 2, 4, 8, 16])),
    )


def _least_s(task: PipelineTask) -> float:
    """Of all orders of all subsets of the machines, and all cuts."""
    least_s = math.inf
    for count in range(1, min(task.num_machines, task.num_pieces) + 1):
        orders = np.array(list(itertools.permutations(range(task.num_machines), count)))
        for cuts in itertools.combinations(range(1, task.num_pieces), count - 1):
            edges = np.tile([0, *cuts, task.num_pieces], (len(orders), 1))
            least_s = min(least_s, float(task.times_s(orders, edges).min()))
    return least_s


def _kept_bytes(task: PipelineTask, stages: Sequence[PipelineStage], index: int) -> float:
    pieces = slice(stages[index].first, stages[index].stop)
    in_flight = min(len(stages) - index, task.micro_batches)
    assert task.update_bytes is not None
    passing_bytes = max(in_flight * task.activation_bytes[pieces].sum(), task.update_bytes[pieces].max())
    return float(task.state_bytes[pieces].sum() + passing_bytes)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), machines=st.integers(2, 6), pieces=st.integers(3, 7), limited=st.booleans())
def test_little_is_lost_against_all_pipelines(seed: int, machines: int, pieces: int, limited: bool) -> None:
    task = _task(seed, machines=machines, pieces=pieces, limited=limited)
    least_s = _least_s(task)
    found = best_pipeline(task)
    if found is None:
        assert math.isinf(least_s)
        return
    assert found[0].first == 0
    assert found[-1].stop == task.num_pieces
    assert all(one.stop == other.first for one, other in pairwise(found))
    assert len({stage.machine for stage in found}) == len(found)
    for index, stage in enumerate(found):
        assert _kept_bytes(task, found, index) <= task.memory_bytes[stage.machine] * (1 + 1e-12)
    assert least_s * (1 - 1e-12) <= task.time_s(found) <= least_s * (1 + _REGRET_OF_PIPELINES)


@pytest.mark.parametrize("machines", [EXACT, 40])
def test_no_single_machine_is_faster_and_memory_is_kept(machines: int) -> None:
    for seed in range(3):
        task = _task(seed, machines=machines, pieces=60, limited=seed == 2)
        found = best_pipeline(task)
        assert found is not None
        assert math.isfinite(task.time_s(found))
        alone_s = min(task.time_s((PipelineStage(machine=each, first=0, stop=task.num_pieces),)) for each in range(machines))
        assert task.time_s(found) <= alone_s


def test_two_equal_machines_share_a_network_where_the_link_is_thin_but_not_where_it_is_thinner() -> None:
    def task(bandwidth_bytes_per_s: float) -> PipelineTask:
        return PipelineTask(
            work_s=np.ones((2, 4)),
            step_s=np.zeros(2),
            crossing_bytes=np.array([0.0, 10.0, 1.0, 10.0]),
            bandwidth_bytes_per_s=np.full((2, 2), bandwidth_bytes_per_s),
            latency_s=np.zeros((2, 2)),
            state_bytes=np.zeros(4),
            activation_bytes=np.zeros(4),
            memory_bytes=np.full(2, math.inf),
            micro_batches=10,
        )

    found = best_pipeline(task(1.0))
    assert found is not None
    assert [(stage.first, stage.stop) for stage in found] == [(0, 2), (2, 4)]
    # Filling: 2 + 2 for computing, 1 in each direction; then nine micro-batches more, of 2 each.
    assert task(1.0).time_s(found) == pytest.approx(4 + 2 + 9 * 2)
    alone = best_pipeline(task(0.1))
    assert alone is not None
    assert len(alone) == 1
    assert task(0.1).time_s(alone) == pytest.approx(40)
