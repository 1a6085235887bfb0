"""Layouts whose ranks recompute activations: what they keep and take, and when plans have them."""

import json
import random
from dataclasses import replace

import pytest

from tatami.cluster import Cluster, Link, Processor
from tatami.errors import MemoryLackError, PlanError
from tatami.planning import compared
from tatami.tiling import AlphaBetaCost, Layout, Replica, StagedLayout, plan, plan_stages, timeline, volume_bytes
from tatami.tiling.memory import lacking_bytes, memory_bytes
from tatami.tiling.recomputing import recomputing_stages, refuse_recomputation
from tatami.tiling.room import with_room
from tatami.tiling.staged_price import price_stages
from tatami.workload import Block, Recomputation, RecomputedLayer, Workload, gpt_workload

pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to take", "ignore:.*leaves out")

MIB = 1024**2
BLOCK = Block(
    units=10,
    unit_parameters=1,
    forward_elements=8,
    backward_elements=8,
    flop_per_unit=3e5,
    unit_activation_bytes=100.0,
    sample_activation_bytes=50.0,
)
OTHER = replace(BLOCK, unit_activation_bytes=200.0)
WORKLOAD = Workload(
    samples=20,
    blocks=(BLOCK, OTHER, BLOCK),
    state_bytes_per_parameter=20.0,
    replicated_activation_bytes=1000.0,
    recomputation=Recomputation(
        kept_bytes=70.0,
        layers=(RecomputedLayer(beside_bytes=400.0, blocks=(0,)), RecomputedLayer(beside_bytes=300.0, blocks=(1,))),
        flop_fraction=0.25,
    ),
)
PAIR = Layout(replicas=(Replica(width=1.0, processors=("p0", "p1"), heights=(0.6, 0.4)),))
ROW = Layout(replicas=tuple(Replica(width=0.5, processors=(name,), heights=(1.0,)) for name in ("p0", "p1")))
GPT = gpt_workload(layers=8, width=256, heads=8, tokens=512, samples=8, vocabulary=1000)
COST = AlphaBetaCost()


def cluster_of(*memories: int | None, speed: float = 1e9) -> Cluster:
    processors = tuple(Processor(name=f"p{i}", speed=speed, memory_bytes=each) for i, each in enumerate(memories))
    return Cluster(processors=processors)


def test_a_layout_in_which_nobody_recomputes_is_written_as_before_and_read() -> None:
    assert "recomputes" not in ROW.to_json()
    assert Layout.from_json(ROW.to_json()) == ROW
    some = ROW.recomputing(["p1"])
    assert [replica.get("recomputes") for replica in json.loads(some.to_json())["replicas"]] == [None, True]
    assert Layout.from_json(some.to_json()) == some
    assert some.recomputes == ("p1",)
    assert some.renamed({"p1": "q"}).in_micro_batches(3).recomputes == ("q",)
    assert ROW.recomputing().recomputes == PAIR.recomputing(["p1"]).recomputes == ("p0", "p1")


def test_what_a_rank_keeps_that_recomputes() -> None:
    """Inputs of the layers and what lies outside of them, the block outside of layers, and one layer: the units of that whose
    units keep most, and the most of any beside."""
    state_bytes, beside_bytes = 20 * 3, 70 + 400
    of_units = {6: 6 * 100 + 50 + 6 * 200 + 50, 4: 4 * 100 + 50 + 4 * 200 + 50}
    kept = memory_bytes(PAIR.recomputing(), workload=WORKLOAD)
    assert kept == {
        "p0": 6 * state_bytes + 20 * (beside_bytes + of_units[6]),
        "p1": 4 * state_bytes + 20 * (beside_bytes + of_units[4]),
    }
    passing = replace(WORKLOAD, backward_moments=((1.5, 0.5),))
    all_bytes = 1000 + 2 * (10 * 100 + 50) + 10 * 200 + 50
    assert memory_bytes(PAIR.recomputing(), workload=passing)["p1"] == kept["p1"] + 20 * 0.5 * all_bytes
    parts = memory_bytes(PAIR.recomputing().in_micro_batches(4), workload=WORKLOAD)
    assert parts["p1"] == 4 * state_bytes + 5 * (beside_bytes + of_units[4])


def test_what_it_takes() -> None:
    """The forward pass of the layers once more, with its sums over the replica."""
    cluster = cluster_of(None, None)
    for layout in (PAIR, ROW):
        kept, again = (COST.price(each, cluster=cluster, workload=WORKLOAD) for each in (layout, layout.recomputing()))
        assert again.compute == pytest.approx(1.25 * kept.compute)
        assert again.gradients == kept.gradients
        # Two of three blocks have their forward sum once more: of six sums two.
        assert again.tensor_parallel == pytest.approx(kept.tensor_parallel * 8 / 6)
        volumes = [volume_bytes(each, workload=WORKLOAD, cluster=cluster) for each in (layout, layout.recomputing())]
        assert volumes[1] == pytest.approx(volumes[0] * 8 / 6 if layout is PAIR else volumes[0])
        times = timeline(layout.recomputing(), cluster=cluster, workload=WORKLOAD)
        assert max(each.total_s for each in times) == pytest.approx(again.total)
    some = COST.price(ROW.recomputing(["p1"]), cluster=cluster, workload=WORKLOAD)
    assert some.compute == pytest.approx(1.25 * COST.price(ROW, cluster=cluster, workload=WORKLOAD).compute)


def test_of_a_hundred_clusters_no_plan_keeps_too_much_and_those_that_fit_stay() -> None:
    chance, recomputing = random.Random(7), 0
    never = replace(GPT, recompute=False)
    for _ in range(100):
        memories = [round(chance.uniform(100, 700) * MIB) for _ in range(3)]
        speeds = [chance.choice((2e9, 1e10)) for _ in range(3)]
        cluster = Cluster(
            processors=tuple(
                Processor(name=f"p{i}", speed=speed, memory_bytes=memory)
                for i, (speed, memory) in enumerate(zip(speeds, memories, strict=True))
            )
        )
        layout = chance.choice(
            (
                Layout(replicas=tuple(Replica(width=1 / 3, processors=(f"p{i}",), heights=(1.0,)) for i in range(3))),
                Layout(
                    replicas=(
                        Replica(width=0.5, processors=("p0",), heights=(1.0,)),
                        Replica(width=0.5, processors=("p1", "p2"), heights=(0.5, 0.5)),
                    )
                ),
            )
        )
        kept, found = (with_room(layout, cluster=cluster, workload=each, cost=COST) for each in (never, GPT))
        if kept is not None:
            assert not kept.recomputes
        if not lacking_bytes(layout, cluster=cluster, workload=GPT):
            assert found == kept == layout
        if found is None:
            assert kept is None
            continue
        assert not lacking_bytes(found, cluster=cluster, workload=GPT)
        recomputing += bool(found.recomputes)
        if kept is not None and found.recomputes:
            prices = [COST.price(each, cluster=cluster, workload=GPT).total for each in (found, kept)]
            assert prices[0] < 0.95 * prices[1]
        elif kept is not None:
            assert found == kept
    assert 5 < recomputing < 95


def test_the_machine_without_memory_recomputes_and_the_other_does_not() -> None:
    one = ROW.replicas[0].as_wide_as(1.0)
    least = memory_bytes(Layout(replicas=(one.in_micro_batches(8),)), workload=GPT)["p0"]
    parts = ROW.in_micro_batches(8)
    middle = sum(memory_bytes(each, workload=GPT)["p1"] for each in (parts, parts.recomputing())) / 2
    cluster = cluster_of(None, round(middle))
    with pytest.raises(MemoryLackError, match="It fits if activations are recomputed: leave that to the planner"):
        plan("grid", cluster=cluster_of(round(0.8 * least)), workload=replace(GPT, recompute=False))
    found = plan("weighted", cluster=cluster, workload=GPT)
    assert found.layout.recomputes == ("p1",)
    assert found.memory_bytes["p1"] <= middle
    assert plan("weighted", cluster=cluster, workload=replace(GPT, recompute=True)).layout.recomputes == ("p0", "p1")
    words = str(compared(["weighted"], cluster=cluster, workload=GPT)).replace("\n", " ")
    assert "To save memory, p1 recomputes its activations: 1.3 x the work, " in words
    assert " MiB in place of " in words


def test_where_not_even_that_makes_room_the_error_says_so() -> None:
    lack = r"finds no room for this network, with one sample at a time, recomputing all activations: p0 lacks"
    with pytest.raises(MemoryLackError, match=lack):
        plan(
            "weighted", cluster=cluster_of(round(1.02 * GPT.replicated_state_bytes + 20 * GPT.gradient_elements)), workload=GPT
        )


def test_batch_statistics_are_summed_once_more_by_all_or_none() -> None:
    layers = Recomputation(kept_bytes=0.0, layers=(RecomputedLayer(beside_bytes=100.0),), flop_fraction=0.25)
    workload = replace(WORKLOAD, blocks=(), replicated_flop_per_sample=10**9, recomputation=layers)
    normalized = replace(workload, batch_statistics=(5,))
    refuse_recomputation(ROW.recomputing(["p0"]), workload=workload)
    refuse_recomputation(ROW.recomputing(), workload=normalized)
    with pytest.raises(PlanError, match="p0 is to recompute activations and others are not, and this network has batch norm"):
        refuse_recomputation(ROW.recomputing(["p0"]), workload=normalized)
    with pytest.raises(PlanError, match="p1 is to recompute activations, and this network has no repeated layers"):
        refuse_recomputation(ROW.recomputing(["p1"]), workload=replace(workload, recomputation=None))
    found = with_room(ROW, cluster=cluster_of(None, 5_000), workload=normalized, cost=COST)
    assert found is not None
    assert found.recomputes == ("p0", "p1")
    again, kept = (COST.price(each, cluster=cluster_of(None, None), workload=normalized) for each in (ROW.recomputing(), ROW))
    assert again.tensor_parallel == pytest.approx(1.5 * kept.tensor_parallel)


SLOW = Link(bandwidth_bytes_per_s=1e7, latency_s=1e-4)
"""So slow that stages are faster than whole replicas."""


def halves(*again: int) -> StagedLayout:
    """Two stages of eight micro-batches, of which these recompute."""
    laid = tuple(
        Layout(replicas=(Replica(width=1.0, processors=(name,), heights=(1.0,), micro_batches=8),)) for name in ("p0", "p1")
    )
    return StagedLayout(stages=laid, cuts=(9,)).recomputing(again)


def test_a_stage_that_recomputes_keeps_the_inputs_of_its_layers_and_takes_longer() -> None:
    """One piece is the embedding, two are a layer: p0 has four layers, and keeps two micro-batches."""
    cluster = replace(cluster_of(None, None), network=SLOW)
    kept, first, both = (
        price_stages(halves(*again), cluster=cluster, workload=GPT, hides=False) for again in ((), (0,), (0, 1))
    )
    assert first.recomputes == ("p0",)
    assert first.memory_bytes["p1"] == kept.memory_bytes["p1"]
    dropped = [layer.kept_bytes - layer.input_bytes for piece in GPT.pieces[:9] for layer in piece.layers]
    (whole,) = {layer.kept_bytes for piece in GPT.pieces for layer in piece.layers}
    assert len(dropped) == 4
    assert kept.memory_bytes["p0"] - first.memory_bytes["p0"] == pytest.approx(2 * sum(dropped) - whole)
    assert kept.memory_bytes["p1"] - both.memory_bytes["p1"] == pytest.approx(sum(dropped) - whole)
    flop = [sum(piece.flop_per_sample for piece in own) for own in (GPT.pieces[:9], GPT.pieces[9:])]
    again = sum(layer.flop for piece in GPT.pieces[:9] for layer in piece.layers)
    assert first.ranks[0].pass_s / kept.ranks[0].pass_s == pytest.approx(1 + again / flop[0])
    assert first.ranks[0].again_s == pytest.approx(again / 1e9)
    assert (kept.ranks[1].late_s > 0, both.ranks[1].late_s) == (True, 0.0)
    assert kept.iteration_s < first.iteration_s < both.iteration_s
    assert StagedLayout.from_json(first.layout.to_json()) == first.layout == halves(0)


def test_the_stage_without_memory_recomputes_and_the_other_does_not() -> None:
    kept, again = (
        price_stages(halves(*stages), cluster=cluster_of(None, None), workload=GPT).memory_bytes for stages in ((), (0,))
    )
    short = round((kept["p0"] + again["p0"]) / 2)
    cluster = replace(cluster_of(short, short), network=SLOW)
    found = plan_stages(cluster, GPT, stages=2, micro_batches=8)
    assert found is not None
    assert found.fits
    assert found.recomputes
    assert plan_stages(cluster, replace(GPT, recompute=False), stages=2, micro_batches=8) is None
    everyone = plan_stages(cluster_of(None, None), replace(GPT, recompute=True), stages=2)
    assert everyone is not None
    assert set(everyone.recomputes) == {"p0", "p1"}
    roomy = plan_stages(replace(cluster_of(10**12, 10**12), network=SLOW), GPT, stages=2)
    assert roomy is not None
    assert not roomy.recomputes
    words = str(compared(None, cluster=cluster, workload=GPT, with_stages=True, stages=2, micro_batches=8)).replace("\n", " ")
    assert " activations: 1.3 x the work, " in words


def test_of_twenty_clusters_no_staged_plan_keeps_too_much() -> None:
    """And those that keep all activations stay, unless recomputing is clearly faster."""
    chance, recomputing = random.Random(5), 0
    for _ in range(20):
        cluster = replace(cluster_of(*(round(chance.uniform(110, 230) * MIB) for _ in range(2))), network=SLOW)
        kept, found = (plan_stages(cluster, replace(GPT, recompute=each), stages=2, micro_batches=4) for each in (False, None))
        assert found is not None
        assert found.fits
        recomputing += bool(found.recomputes)
        if kept is not None and found.recomputes:
            assert found.iteration_s < 0.95 * kept.iteration_s
        elif kept is not None:
            assert found.ranks == kept.ranks
    assert 3 < recomputing < 17


def test_what_stages_cannot_recompute_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="p0 is to recompute activations, and p1 of the same stage is not: have all ranks"):
        StagedLayout(stages=(ROW.recomputing(["p0"]),), cuts=())
    cluster, last = cluster_of(None, None), replace(halves(1), cuts=(16,))  # in front of the last perceptron
    with pytest.raises(PlanError, match=r"p1 is to recompute activations, and no repeated layer .* wholly inside of stage 1"):
        price_stages(last, cluster=cluster, workload=GPT)
    assert recomputing_stages(last, workload=GPT).recomputes == ("p0",)
    unknown = replace(GPT, pieces=tuple(replace(piece, layers=()) for piece in GPT.pieces))
    with pytest.raises(PlanError, match="no stage of this layout has a whole repeated layer"):
        recomputing_stages(last, workload=unknown)
    with pytest.raises(PlanError, match="activations cannot be recomputed: this network has no repeated layers"):
        compared(None, cluster=cluster, workload=replace(GPT, recomputation=None), recompute=True)
