"""Cost models against figures worked out by hand, and bounds that no plan beats."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, OwnLink, Processor
from tatami.errors import PlanError
from tatami.tiling import (
    AlphaBetaCost,
    Layout,
    PaperCost,
    PlannedSum,
    Replica,
    SumKind,
    compare,
    time_bound_s,
    traffic_of,
    volume_bytes,
)
from tatami.tiling.links import LinkGroup, SlowestLink
from tatami.tiling.traffic import is_one_vector, riding_elements, sent_bytes
from tatami.workload import Block, Workload, linear_pair

LOCAL = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6)
SLOW = Link(bandwidth_bytes_per_s=1e6, latency_s=1e-3)
WORKLOAD = Workload.mlp(30, 40, 10, samples=100)
GRID = Layout(
    replicas=(
        Replica(width=0.25, processors=("p0", "p1"), heights=(0.5, 0.5)),
        Replica(width=0.75, processors=("p2", "p3"), heights=(0.5, 0.5)),
    )
)


def four(*hosts: str) -> Cluster:
    processors = tuple(Processor(name=f"p{i}", speed=1.0, host=host) for i, host in enumerate(hosts))
    return Cluster(processors=processors, local=LOCAL, network=SLOW)


def test_eq_8_sums_over_pairs() -> None:
    blocks = (linear_pair(30, 40, 10), linear_pair(10, 8, 4))
    cost = PaperCost().price(
        GRID, cluster=four(*"aabb"), workload=Workload(samples=100, blocks=blocks, replicated_parameters=7)
    )
    assert cost.tensor_parallel == pytest.approx(2 * 14 * 100 * 0.75)
    assert cost.gradients == 2 * (40 * 40 + 14 * 8 + 7)
    assert (cost.compute, cost.unit) == (0.0, "elements")


def test_alpha_beta_by_hand_on_two_hosts() -> None:
    cost = AlphaBetaCost(flop_per_s=1e6).price(GRID, cluster=four(*"aabb"), workload=WORKLOAD)
    assert cost.compute == pytest.approx(WORKLOAD.flop(width=0.75, height=0.5) / 1e6)
    # Replicas are inside a host: two ranks swap their 0.75 * 100 * 10 * 4 bytes.
    assert cost.tensor_parallel == pytest.approx(1e-6 + 3000 / 1e9)
    # Groups span the hosts: one message of half the 40 units, each of 40 elements, to one neighbour. Two tensors and two
    # replicas' sizes ride on it.
    assert cost.gradients == pytest.approx(1e-3 + (20 * 40 + 2 + 2) * 4 / 1e6)
    assert cost.total == cost.compute + cost.tensor_parallel + cost.gradients


def test_alpha_beta_by_hand_with_replicas_across_hosts() -> None:
    cost = AlphaBetaCost(flop_per_s=1e6).price(GRID, cluster=four(*"abab"), workload=WORKLOAD)
    assert cost.tensor_parallel == pytest.approx(1e-3 + 3000 / 1e6)
    # What rides is told by one of a replica to all of the other, wherever they are.
    assert cost.gradients == pytest.approx(1e-6 + 20 * 40 * 4 / 1e9 + 4 * 4 / 1e6)


def test_replicated_layers_are_summed_across_replicas_too() -> None:
    workload = replace(WORKLOAD, replicated_parameters=500)
    plain = AlphaBetaCost().price(GRID, cluster=four(*"aabb"), workload=WORKLOAD)
    more = AlphaBetaCost().price(GRID, cluster=four(*"aabb"), workload=workload)
    assert more.gradients - plain.gradients == pytest.approx(500 * 4 / 1e6), "riding along"
    many = AlphaBetaCost().price(GRID, cluster=four(*"aabb"), workload=replace(WORKLOAD, replicated_parameters=20_000))
    # Four ranks on two hosts, directly: two rounds, in each three quarters of 20,004 elements.
    assert many.gradients - plain.gradients == pytest.approx(2e-3 + (1.5 * 20_004 - 4) * 4 / 1e6)


def test_the_slowest_of_every_block_counts() -> None:
    """Six heads over 4, 2 and 1 are 3, 2 and 1 whole ones, in 1 where an even sharing would take 6/7."""
    heads = Block(units=6, unit_parameters=1, forward_elements=1, flop_per_unit=10.0)
    hidden = Block(units=700, unit_parameters=1, forward_elements=1, flop_per_unit=1.0, flop_per_sample=3.0)
    workload = Workload(samples=100, blocks=(heads, hidden, heads), replicated_flop_per_sample=41, sample_flop=0.0)
    layout = Layout(replicas=(Replica(width=1.0, processors=("p0", "p1", "p2"), heights=(4 / 7, 2 / 7, 1 / 7)),))
    cluster = Cluster.from_speeds([4.0, 2.0, 1.0])
    shared = 41 / (2 * 60 + 700)  # of what is repeated, for each flop of a block
    attention = max(2 * 30 / 4, 2 * 20 / 2, 2 * 10 / 1) + 120 * shared / 1
    mlp = 100 + 3 + 700 * shared
    cost = AlphaBetaCost(flop_per_s=1.0).price(layout, cluster=cluster, workload=workload)
    assert cost.compute == pytest.approx(100 * (attention + mlp))


def test_a_rank_without_units_of_a_block_does_not_pay_for_it() -> None:
    heads = Block(units=1, unit_parameters=1, forward_elements=1, flop_per_unit=10.0, flop_per_sample=5.0)
    hidden = Block(units=80, unit_parameters=1, forward_elements=1, flop_per_unit=1.0)
    layout = Layout(replicas=(Replica(width=1.0, processors=("p0", "p1"), heights=(0.9, 0.1)),))
    workload = Workload(samples=1, blocks=(heads, hidden))
    cost = AlphaBetaCost(flop_per_s=1.0).price(layout, cluster=Cluster.from_speeds([9.0, 1.0]), workload=workload)
    assert cost.compute == pytest.approx(15 / 9 + 8)


def test_gradients_of_coarse_blocks_are_priced_where_they_lie() -> None:
    """Two replicas; of the two heads the first replica gives one each to p0 and p1, though p0 is three quarters of it."""
    heads = Block(units=2, unit_parameters=1000, forward_elements=1, flop_per_unit=1.0)
    hidden = Block(units=800, unit_parameters=1, forward_elements=1, flop_per_unit=1.0)
    layout = Layout(
        replicas=(
            Replica(width=0.5, processors=("p0", "p1"), heights=(0.6, 0.4)),
            Replica(width=0.5, processors=("p2", "p3"), heights=(0.6, 0.4)),
        )
    )
    cluster = Cluster(
        processors=tuple(Processor(name=f"p{i}", speed=1.0, host="h") for i in range(4)),
        local=Link(bandwidth_bytes_per_s=1.0, latency_s=0.0),
    )
    cost = AlphaBetaCost().price(layout, cluster=cluster, workload=Workload(samples=100, blocks=(heads, hidden)))
    assert cost.gradients == pytest.approx(4 * (1000 + 480 + 2)), "and two replicas' numbers of samples"


def test_identical_blocks_are_priced_once_and_as_many() -> None:
    mlp = linear_pair(30, 40, 10, name="h.0.mlp")
    same = [replace(mlp, name=f"h.{index}.mlp") for index in range(5)]
    workload = Workload(samples=100, blocks=tuple(same))
    assert [count for _, count in workload.kinds] == [5]
    one, five = (AlphaBetaCost().price(GRID, cluster=four(*"aabb"), workload=each) for each in (WORKLOAD, workload))
    assert five.compute == pytest.approx(5 * one.compute)
    assert five.tensor_parallel == pytest.approx(5 * one.tensor_parallel)


def test_all_wait_for_the_slowest_of_noisy_ranks() -> None:
    """Speeds with a standard deviation of 10 %: of four, the slowest is expected 1.03 of them behind."""
    plain = four(*"aabb")
    noisy = replace(plain, processors=tuple(replace(each, spread=0.27) for each in plain.processors))
    one, other = (AlphaBetaCost().price(GRID, cluster=each, workload=WORKLOAD) for each in (plain, noisy))
    assert other.compute == pytest.approx(one.compute * 1.103, rel=2e-3)
    assert (other.tensor_parallel, other.gradients) == (one.tensor_parallel, one.gradients)
    alone = Layout(replicas=(Replica(width=1.0, processors=("p0",), heights=(1.0,)),))
    assert AlphaBetaCost().price(alone, cluster=noisy, workload=WORKLOAD) == AlphaBetaCost().price(
        alone, cluster=plain, workload=WORKLOAD
    )


def test_plans_say_in_which_time_nine_of_ten_iterations_are_expected() -> None:
    plain = four(*"aabb")
    noisy = replace(plain, processors=tuple(replace(each, spread=0.27) for each in plain.processors))
    (known,) = compare(["even"], cluster=plain, workload=WORKLOAD)
    (found,) = compare(["even"], cluster=noisy, workload=WORKLOAD)
    assert known.range_s == pytest.approx((0.9 * known.predicted_s, 1.2 * known.predicted_s))
    assert found.range_s[0] < found.predicted_s < found.range_s[1]
    low_s, high_s = found.range_s[0] / 0.9, found.range_s[1] / 1.2  # but for what the model leaves out
    beside_s = found.predicted.tensor_parallel + found.predicted.gradients
    draws = np.random.default_rng(0).normal(0.0, 0.1, (20_000, 4)).max(axis=1)
    times_s = beside_s + known.predicted.compute * (1 + draws)
    assert float(((low_s <= times_s) & (times_s <= high_s)).mean()) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("spread", [0.01, 0.27, 1.9, 3.3, 100.0])
@pytest.mark.parametrize("planner", ["even", "timed"])
def test_no_iteration_is_expected_to_take_less_than_nothing(planner: str, spread: float) -> None:
    for size in (1, 2, 4):
        plain = four(*"aabb")
        cluster = replace(plain, processors=tuple(replace(each, spread=spread) for each in plain.processors[:size]))
        (found,) = compare([planner], cluster=cluster, workload=WORKLOAD)
        low_s, high_s = found.range_s
        assert 0 <= low_s < high_s
        assert low_s < found.predicted_s


def test_measured_speeds_are_flop_per_second() -> None:
    assert AlphaBetaCost().scale(Cluster.from_speeds([1.0, 0.5])) == 1e9
    assert AlphaBetaCost().scale(Cluster.from_speeds([2e9, 3e9])) == 1.0
    # One that was stopped while it was measured makes no relative speeds of the others.
    assert AlphaBetaCost().scale(Cluster.from_speeds([2e9, 3e5])) == 1.0
    with pytest.raises(PlanError, match="flop_per_s of speed 1"):
        AlphaBetaCost(flop_per_s=0.0)


MESSAGE_S = 0.01
LEVEL = [
    [[1], [1]],
    [[1, 1], [1, 1], [1, 1]],
    [[1, 1, 2], [1, 1, 2]],
    [[1], [1], [1], [1]],
    [[1, 1, 1, 1]],
    [[2, 1, 1]],
    [[1] * 20],
]


@pytest.mark.parametrize("heights", LEVEL)
@pytest.mark.parametrize("replicated", [0, 9_000, 24_000])
@pytest.mark.parametrize("samples", [24, 2400])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("statistics", [(), (33, 9000, 33)])
def test_the_price_is_that_of_the_messages_that_are_sent(
    heights: list[list[int]], replicated: int, samples: int, apart: bool, statistics: tuple[int, ...]
) -> None:
    """Rounds, messages and bytes of the busiest rank of each, counted on the schedules, where tiles divide evenly.

    Bytes are copied both ways at the rate of the wire: where there are many, it is the copying that takes longer.
    """
    layout = Layout(
        replicas=tuple(
            Replica(
                width=1 / len(heights),
                processors=tuple(f"{c}.{r}" for r in range(len(replica))),
                heights=tuple(each / sum(replica) for each in replica),
            )
            for c, replica in enumerate(heights)
        )
    )
    link = Link(bandwidth_bytes_per_s=1e6, latency_s=1.0)
    processors = tuple(
        Processor(name=n, speed=1.0, host=n if apart else "h", message_s=MESSAGE_S, copy_bytes_per_s=1e6)
        for n in layout.processors
    )
    cluster = Cluster(processors=processors, local=link, network=link)
    blocks = (linear_pair(3, 720, 5), linear_pair(5, 720, 4, input_gradient=True))
    workload = Workload(
        samples=samples, blocks=blocks, replicated_parameters=replicated, trained_tensors=4, batch_statistics=statistics
    )
    hosts = {processor.name: processor.host for processor in processors}
    traffic = traffic_of(layout.cut_blocks(workload), workload=workload, names=layout.processors, hosts=hosts)
    if not any(phase.num_rounds == 0 for each in traffic.sums for phase in each.schedule.phases):
        cost = AlphaBetaCost().price(layout, cluster=cluster, workload=workload)
        inside = [sum(map(seconds, replica)) for replica in traffic.replicas]
        assert cost.tensor_parallel == pytest.approx(max(inside) + sum(map(seconds, traffic.statistics)), rel=1e-3)
        assert len(traffic.statistics) == (2 * len(statistics) if len(heights) > 1 else 0)
        assert cost.gradients == pytest.approx(sum(map(seconds, traffic.gradients)), rel=2e-3)
    for_blocks = traffic.size_bytes
    for each in traffic.gradients:
        riding = each.riders * sum(message.carries_riders for message in each.messages) * each.element_bytes
        for_blocks -= sent_bytes(each) if each.kind is SumKind.REPLICATED else riding
    for_blocks -= sum(map(sent_bytes, traffic.statistics))
    replicas, ranks = len(heights), len(layout.processors)
    if is_one_vector(replicas=replicas, tiles=ranks, ranks=ranks, blocks=2):
        for_blocks -= 2 * (replicas - 1) * riding_elements(workload, replicas=replicas) * workload.element_bytes
    assert volume_bytes(layout, workload=workload, cluster=cluster) == pytest.approx(for_blocks, rel=1e-3)


@pytest.mark.parametrize(("ranks", "kind"), [(2, SumKind.GRADIENTS), (16, SumKind.GRADIENTS), (17, SumKind.REPLICATED)])
def test_very_many_ranks_without_blocks_sum_in_fewer_messages(ranks: int, kind: SumKind) -> None:
    """Up to sixteen, each sums a part of the one vector of all gradients; more do it by halving and doubling."""
    names = tuple(f"p{rank}" for rank in range(ranks))
    replicas = tuple(Replica(width=1 / ranks, processors=(name,), heights=(1.0,)) for name in names)
    layout, link = Layout(replicas=replicas), Link(bandwidth_bytes_per_s=1e6, latency_s=1.0)
    own = tuple(Processor(name=n, speed=1.0, host=n, message_s=MESSAGE_S, copy_bytes_per_s=1e6) for n in names)
    workload = Workload(samples=64 * ranks, blocks=(), replicated_parameters=240_000, trained_tensors=4)
    tilings = [layout.cut(samples=workload.samples, units=1)]
    traffic = traffic_of(tilings, workload=workload, names=names, hosts={name: name for name in names})
    assert [each.kind for each in traffic.gradients] == [kind]
    cluster = Cluster(processors=own, local=link, network=link)
    cost = AlphaBetaCost().price(layout, cluster=cluster, workload=workload)
    assert cost.gradients == pytest.approx(sum(map(seconds, traffic.gradients)), rel=2e-2)


def seconds(planned: PlannedSum) -> float:
    """A second for each round, `MESSAGE_S` for each message of the busiest rank, a microsecond for each byte on its way."""
    total_s = 0.0
    for phase in planned.schedule.phases:
        for number in range(phase.num_rounds):
            moved = Counter[int]()
            pairs = set()
            for step in phase.steps(number):
                for rank in (step.source, step.target):
                    moved[rank] += step.size * planned.element_bytes
                pairs.add((step.source, step.target))
            messages = Counter(rank for pair in pairs for rank in pair)
            copied_s = max(moved.values()) / 1e6
            total_s += max(1.0 + copied_s / 2, copied_s) + max(messages.values()) * MESSAGE_S
    return total_s


links = st.builds(Link, bandwidth_bytes_per_s=st.floats(1e3, 1e9), latency_s=st.floats(0, 1))


@given(
    hosts=st.lists(st.sampled_from("abcd"), min_size=2, max_size=6),
    local=links,
    network=links,
    exceptions=st.dictionaries(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), links, max_size=6),
    own=st.dictionaries(
        st.sampled_from("abcd"),
        st.builds(OwnLink, bandwidth_bytes_per_s=st.floats(1e3, 1e9), latency_s=st.none() | st.floats(0, 1)),
    ),
    replaced=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6),
)
def test_the_slowest_link_is_that_of_the_slowest_pair(
    hosts: list[str],
    local: Link,
    network: Link,
    exceptions: dict[tuple[str, str], Link],
    own: dict[str, OwnLink],
    replaced: list[tuple[int, int]],
) -> None:
    """Also in a group whose members are replaced one by one."""
    spare = 6
    placed = [*hosts, *("abcdab"[: spare - len(hosts)]), *"abcdef"]
    processors = tuple(Processor(name=f"p{i}", speed=1.0, host=host, link=own.get(host)) for i, host in enumerate(placed))
    listed = {(first, second): link for (first, second), link in exceptions.items() if first <= second}
    cluster = Cluster(processors=processors, local=local, network=network, links=listed)
    names = [f"p{i}" for i in range(len(hosts))]
    group = LinkGroup(SlowestLink(cluster), names)
    for old, new in [(-1, 0), *replaced]:
        comes = f"p{spare + new}"
        if 0 <= old < len(names) and comes not in names:
            group.replace(names[old], comes)
            names[old] = comes
        between = [cluster.link(one, other) for one, other in combinations(names, 2)]
        for found in (group.link(), SlowestLink(cluster).among(names)):
            assert found.bandwidth_bytes_per_s == min(link.bandwidth_bytes_per_s for link in between)
            assert found.latency_s == max(link.latency_s for link in between)


def test_the_slower_link_of_two_hosts_counts_unless_the_pair_has_one() -> None:
    slow, fast = OwnLink(bandwidth_bytes_per_s=1e6), OwnLink(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    cluster = Cluster(
        processors=tuple(
            Processor(name=name, speed=1.0, link=link) for name, link in {"a": slow, "b": fast, "c": fast, "d": None}.items()
        ),
        network=Link(bandwidth_bytes_per_s=1e8, latency_s=1e-3),
        links={("a", "c"): Link(bandwidth_bytes_per_s=5e6, latency_s=0.5)},
    )
    found = {pair: cluster.link(*pair) for pair in ("ab", "bc", "bd", "ac", "ad", "aa")}
    assert {pair: (link.bandwidth_bytes_per_s, link.latency_s) for pair, link in found.items()} == {
        "ab": (1e6, 1e-3),
        "bc": (1e9, 0.0),
        "bd": (1e8, 1e-3),
        "ac": (5e6, 0.5),
        "ad": (1e6, 1e-3),
        "aa": (cluster.local.bandwidth_bytes_per_s, cluster.local.latency_s),
    }
    assert (cluster.fastest_link.bandwidth_bytes_per_s, cluster.fastest_link.latency_s) == (5e9, 0.0)


clusters = st.lists(st.tuples(st.floats(0.01, 10.0), st.sampled_from("abc")), min_size=1, max_size=9).map(
    lambda drawn: Cluster(processors=tuple(Processor(name=f"p{i}", speed=s, host=h) for i, (s, h) in enumerate(drawn)))
)


@given(
    cluster=clusters,
    net=st.tuples(st.integers(1, 500), st.integers(9, 500), st.integers(1, 500)),
    samples=st.integers(9, 3000),
    flop_per_s=st.sampled_from([1e6, 1e9, 1e12]),
    overlaps=st.booleans(),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_no_plan_beats_the_bound(
    cluster: Cluster, net: tuple[int, int, int], samples: int, flop_per_s: float, overlaps: bool
) -> None:
    workload = replace(Workload.mlp(*net, samples=samples), overlaps_sums=overlaps)
    cost = AlphaBetaCost(flop_per_s=flop_per_s)
    for plan in compare(cluster=cluster, workload=workload, cost=cost):
        assert plan.gap >= -1e-9
        assert plan.bound_s == time_bound_s(cluster, workload=workload, cost=cost)


def test_one_processor_reaches_the_bound() -> None:
    for plan in compare(cluster=Cluster.from_speeds([0.5]), workload=WORKLOAD):
        assert plan.gap == pytest.approx(0.0)
