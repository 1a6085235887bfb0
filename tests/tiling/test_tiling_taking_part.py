"""Who takes part, in how many micro-batches, and what is said of those that are left out."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import brute_force
from tatami.cluster import Cluster, Link, Processor, SpeedTable
from tatami.sim.platforms import ClusterPlatform
from tatami.sim.tiling import TilingJob, rehearse
from tatami.tiling import AlphaBetaCost, Layout, Replica, plan
from tatami.tiling.left_out import Reason
from tatami.tiling.memory import memory_bytes
from tatami.tiling.taking_part import QuickPrices, subsets
from tatami.workload import Block, Workload, gpt_workload

GIGABIT = Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6)
FAST = Link(bandwidth_bytes_per_s=5e9, latency_s=1e-5)
GPT = gpt_workload(layers=12, width=768, heads=12, tokens=1024, samples=64)
BLOCK = Block(units=8, unit_parameters=10, forward_elements=8, backward_elements=8, flop_per_unit=1e6)


def machine(name: str, flop_per_s: float, **facts: Any) -> Processor:
    return Processor(name=name, speed=flop_per_s, host=facts.pop("host", name), **facts)


def planned(
    *processors: Processor, workload: Workload = GPT, links: dict[tuple[str, str], Link] | None = None, network: Link = GIGABIT
) -> Any:
    """The plan, and what is warned of."""
    cluster = Cluster(processors=processors, network=network, links=links or {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = plan(cluster=cluster, workload=workload)
    return found, " ".join(str(each.message) for each in caught)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_other_set_of_processors_and_no_other_replicas_are_much_faster(seed: int) -> None:
    """benchmarks/brute_force.py has what 500 cases of up to five processors come to."""
    cluster, workload, cost = brute_force.a_case(seed, most=3)
    best_s, layout = brute_force.least_s(cluster, workload, cost)
    if layout is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert plan(cluster=cluster, workload=workload, cost=cost).predicted_s <= 1.3 * best_s


def test_a_machine_with_a_thin_link_is_left_out_and_the_link_is_named() -> None:
    thin = Link(bandwidth_bytes_per_s=2.5e6, latency_s=5e-3)
    desks = [machine(name, 2e13) for name in "ab"]
    laptop = [machine(f"laptop-{number}", 1e13, host="laptop") for number in range(2)]
    links = {(name, "laptop"): thin for name in "ab"}
    found, told = planned(*desks, *laptop, links=links, network=FAST)
    assert found.left_out == ("laptop-0", "laptop-1")
    assert set(found.reasons.values()) == {Reason.LINK}
    assert "timed leaves out laptop: an iteration is predicted to be shorter without, as what travels over their link" in told
    assert found.predicted_s == pytest.approx(planned(*desks, network=FAST)[0].predicted_s)


@pytest.mark.parametrize(
    ("flop_per_s", "facts", "network", "reason"),
    [
        (1e10, {}, FAST, Reason.NO_WORK),
        (1.5e11, {}, GIGABIT, Reason.SPEED),
        (2e13, {}, GIGABIT, None),
        (2e12, {}, GIGABIT, Reason.LINK),
        (2e13, {"message_s": 30.0}, FAST, Reason.MESSAGES),
        (2e13, {"step_s": 30.0}, FAST, Reason.MESSAGES),
        (2e13, {"memory": "1 GiB"}, FAST, Reason.MEMORY),
        (2e12, {"memory": "2100 MiB"}, GIGABIT, Reason.LINK),
        (2e13, {"memory": "1 MiB"}, FAST, Reason.REPEATED),
    ],
)
def test_the_reason_is_what_would_have_to_be_better(
    flop_per_s: float, facts: dict[str, Any], network: Link, reason: Reason | None
) -> None:
    processors = [machine("a", 2e13, memory="80 GiB"), machine("b", flop_per_s, **facts)]
    found, told = planned(*processors, network=network, workload=GPT.with_samples(512))
    assert found.reasons == ({} if reason is None else {"b": reason})
    assert set(found.layout.processors) == ({"a", "b"} if reason is None else {"a"})
    assert ("timed leaves out b: " in told) == (reason is not None)


@pytest.mark.parametrize(("samples", "reason"), [(16, Reason.SAMPLES), (18, None)])
def test_whole_samples_that_cannot_be_divided_further_are_a_reason(samples: int, reason: Reason | None) -> None:
    """Eight machines compute 2 of 16 samples each, and one more would not make that 1; of 18 samples it takes 2."""
    found, told = planned(*(machine(f"m{index}", 1e12) for index in range(9)), network=FAST, workload=GPT.with_samples(samples))
    assert set(found.reasons.values()) == ({reason} if reason else set())
    assert len(found.left_out) == (reason is not None)
    assert ("as 16 whole samples cannot be divided further" in told) == (reason is not None)


def test_a_slow_network_leaves_the_fastest_machine_alone_in_as_many_micro_batches_as_it_needs() -> None:
    pcs = [machine("small", 9e12, memory="8 GiB"), machine("big", 1.4e13, memory="12 GiB")]
    found, told = planned(*pcs)
    (replica,) = found.layout.replicas
    assert replica.processors == ("big",)
    assert 1 < replica.micro_batches < 64
    assert found.memory_bytes["big"] <= 12 * 2**30
    fewer = Layout(replicas=(replica.in_micro_batches(replica.micro_batches - 1),))
    kept = memory_bytes(fewer, workload=GPT)["big"]
    assert kept > 12 * 2**30, "no fewer would do"
    assert "leaves out small" in told


@pytest.mark.parametrize(
    "workload", [Workload.mlp(203, 80, 26, samples=64), gpt_workload(layers=4, width=64, heads=4, tokens=16, samples=8)]
)
def test_what_ranks_without_a_tile_hear_is_priced_as_it_is_simulated(workload: Workload) -> None:
    """One machine computes, and three others in the run keep the weights that every rank repeats."""
    cluster = Cluster(processors=tuple(machine(name, 1e12) for name in "abcd"), network=GIGABIT)
    alone = Layout(replicas=(Replica(width=1.0, processors=("a",), heights=(1.0,)),))
    job = TilingJob(platform=ClusterPlatform(cluster=cluster), cluster=cluster, workload=workload, layout=alone, iterations=2)
    price = AlphaBetaCost().price(alone, cluster=cluster, workload=workload)
    assert price.gradients > 0
    assert price.total == pytest.approx(rehearse(job).iteration_s[-1], rel=0.1)
    assert AlphaBetaCost().price(alone, cluster=cluster.only(["a"]), workload=workload).gradients == 0
    planned = plan(cluster=cluster, workload=workload, idle=True)
    assert planned.predicted_s <= price.total


def test_groups_with_fast_links_are_found() -> None:
    """Two regions with four machines each: the faster one, whose machines are far apart in the order of the ranks."""
    far = Link(bandwidth_bytes_per_s=125e6, latency_s=20e-3)
    names = [f"{region}{number}" for number in range(4) for region in "ew"]
    processors = [machine(name, 1.0e13 if name[0] == "e" else 1.1e13) for name in names]
    links = {(one, other): far for one in names for other in names if one < other and one[0] != other[0]}
    near = {(one, other): Link(bandwidth_bytes_per_s=3e9, latency_s=3e-5) for one in names for other in names if one < other}
    found, _ = planned(*processors, links={**near, **links})
    assert {name[0] for name in found.layout.processors} == {"w"}
    assert len(found.layout.processors) == 4


def test_relative_speeds_leave_nobody_out_unless_their_flop_are_told() -> None:
    """How long computing takes is not known then, and a guess is no reason to leave a machine idle that was asked for."""
    cluster = Cluster(
        processors=tuple(Processor(name=name, speed=1.0, host=name) for name in "abc"),
        network=Link(bandwidth_bytes_per_s=1e6, latency_s=1e-2),
    )
    workload = Workload.mlp(203, 80, 26, samples=1024)
    assert plan(cluster=cluster, workload=workload).left_out == ()
    with pytest.warns(UserWarning, match="leaves out b, c: .* what travels over their link"):
        assert len(plan(cluster=cluster, workload=workload, cost=AlphaBetaCost(flop_per_s=1e11)).left_out) == 2
    flop = replace(cluster, processors=tuple(replace(each, speed=1e11) for each in cluster.processors))
    with pytest.warns(UserWarning, match="leaves out b, c: .* what travels over their link"):
        assert len(plan(cluster=flop, workload=workload).left_out) == 2


def test_relative_speeds_leave_out_those_without_whom_alone_the_network_fits() -> None:
    """Every rank repeats 10 MB beside the activations of a sample, for which the second has no room whatever it is given."""
    workload = Workload(samples=8, replicated_parameters=500_000, replicated_flop_per_sample=10**6)
    cluster = Cluster(
        processors=(
            Processor(name="a", speed=1.0, memory_bytes=20 * 10**6),
            Processor(name="b", speed=1.0, memory_bytes=12 * 10**6),
        )
    )
    with pytest.warns(UserWarning, match="leaves out b"):
        assert plan(cluster=cluster, workload=workload).left_out == ("b",)


def test_idle_ranks_count_where_they_are_in_the_run() -> None:
    cluster = Cluster(
        processors=(machine("a", 1e13), machine("b", 1e9, step_s=0.5)), network=Link(bandwidth_bytes_per_s=1e6, latency_s=1e-2)
    )
    with pytest.warns(UserWarning, match="leaves out b"):
        apart, together = (plan(cluster=cluster, workload=GPT.with_samples(2), idle=idle) for idle in (False, True))
    assert apart.layout == together.layout
    assert apart.predicted_s == pytest.approx(GPT.with_samples(2).flop(width=1, height=1) / 1e13)
    assert together.predicted.compute == pytest.approx(0.5)
    # The idle rank keeps the weights that all repeat, and hears their gradients.
    assert together.predicted.gradients == pytest.approx(GPT.replicated_parameters * 4 / 1e6 + 1e-2, rel=1e-3)


def test_of_many_processors_few_sets_are_priced() -> None:
    processors = [machine(f"p{rank}", 1e13 * (1 + rank % 7), host=f"h{rank // 8}") for rank in range(400)]
    cluster = Cluster(processors=tuple(processors), network=GIGABIT)
    cost = AlphaBetaCost()
    workload = GPT.with_samples(1600)
    quick = QuickPrices(cluster, workload=workload, cost=cost, idle=False)
    best = subsets(quick, workload=workload)[0]
    assert len(quick.found) < 400
    # All of the fastest eight hosts, or whatever is cheaper: no prefix by speed and no host alone is.
    fastest = sorted(range(400), key=lambda rank: -cluster.processors[rank].speed)
    for size in (1, 2, 3, 5, 10, 30, 57, 100, 200, 400):
        assert quick.of(best) <= quick.of(frozenset(fastest[:size]))


def test_calls_and_sums_inside_a_replica_come_once_for_each_micro_batch_and_gradients_once() -> None:
    processors = tuple(Processor(name=name, speed=1e9, call_s=1e-3, step_s=5e-3) for name in "abcd")
    cluster = Cluster(processors=processors, network=Link(bandwidth_bytes_per_s=1e6, latency_s=1e-2))
    workload = Workload(samples=64, blocks=(BLOCK,) * 3)
    replicas = tuple(Replica(width=0.5, processors=tuple(own), heights=(0.5, 0.5)) for own in ("ab", "cd"))
    one, four = (
        AlphaBetaCost().price(Layout(replicas=replicas).in_micro_batches(number), cluster=cluster, workload=workload)
        for number in (1, 4)
    )
    assert one.compute == pytest.approx(32 * 3 * 4e6 / 1e9 + 3 * 1e-3 + 5e-3)
    assert four.compute == pytest.approx(one.compute + 3 * 3 * 1e-3)
    # Two ranks swap what they have: six sums of 32 samples x 8 elements.
    assert one.tensor_parallel == pytest.approx(6 * (1e-2 + 32 * 8 * 4 / 1e6))
    assert four.tensor_parallel == pytest.approx(one.tensor_parallel + 3 * 6 * 1e-2)
    assert four.gradients == one.gradients


def test_smaller_micro_batches_are_taken_where_the_speeds_by_size_say_so() -> None:
    flop = Workload(samples=64, blocks=(BLOCK,)).flop(width=1.0, height=1.0)
    outgrown = SpeedTable([(flop / 8, 2e9), (flop, 1e9)])
    cluster = Cluster(processors=(machine("a", 1.0),))
    cluster = replace(cluster, processors=(replace(cluster.processors[0], speed=outgrown),))
    found = plan(cluster=cluster, workload=Workload(samples=64, blocks=(BLOCK,)))
    assert found.layout.replicas[0].micro_batches == 8
    assert found.predicted_s == pytest.approx(flop / 2e9)
    assert plan(cluster=cluster, workload=Workload(samples=64, blocks=(BLOCK,)), micro_batches=1).predicted_s == pytest.approx(
        flop / 1e9
    )
