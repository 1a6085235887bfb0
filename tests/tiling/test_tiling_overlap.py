"""Gradient sums that hide behind the backward pass."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, OwnLink, Processor, SpeedTable
from tatami.tiling import AlphaBetaCost, Layout, Replica, plan, timeline
from tatami.tiling.overlap import LEAST_BYTES, buckets_of, late_share, not_hidden_s, usual_bucket_bytes
from tatami.tiling.traffic import bucket_sum
from tatami.workload import Block, Piece, Workload, gpt_workload

HOSTS = Cluster(
    processors=tuple(Processor(name=f"p{rank}", speed=1e9, host=f"h{rank}") for rank in range(2)),
    network=Link(bandwidth_bytes_per_s=1e7, latency_s=1e-3),
)
WORKLOAD = Workload(samples=8, replicated_parameters=1 << 18, replicated_flop_per_sample=10**8, overlaps_sums=True)
REPLICAS = Layout(replicas=tuple(Replica(width=0.5, processors=(f"p{rank}",), heights=(1.0,)) for rank in range(2)))


@pytest.mark.parametrize(
    ("sums_s", "buckets", "late", "left_s"),
    [
        (5.0, 1, 0.5, 5.0),  # they leave when the pass ends
        (2.0, 8, 0.0, 0.25),  # all but the last bucket are done by then
        (10.0, 8, 0.1, 10.0 - 7 / 8 * 2.0),  # they go on from the first bucket's end
        (2.0, 4, 0.0, 0.5),
        (2.0, 8, 0.6, 1.2),  # the gradients of the first layer are ready when the pass ends
        (2.0, 8, 1.0, 2.0),
    ],
)
def test_what_is_left_when_the_pass_ends(sums_s: float, buckets: int, late: float, left_s: float) -> None:
    assert not_hidden_s(sums_s, buckets=buckets, late=late, backward_s=2.0) == pytest.approx(left_s)


def test_the_first_layer_is_ready_last() -> None:
    block = Block(units=10, unit_parameters=3, forward_elements=1, flop_per_unit=1.0)
    network = Workload(samples=8, blocks=(block, block), replicated_parameters=40, replicated_flop_per_sample=1)
    assert late_share(network) == pytest.approx(30 / 100)
    assert late_share(replace(network, pieces=(Piece(name="embedding", flop_per_sample=0, parameters=40),))) == pytest.approx(
        0.4
    )
    assert late_share(WORKLOAD) == 0.0


@pytest.mark.parametrize(("size", "largest"), [(LEAST_BYTES, 256 << 10), (16 << 20, 2 << 20), (1 << 30, 4 << 20)])
def test_a_bucket_is_a_part_of_all_gradients(size: int, largest: int) -> None:
    assert usual_bucket_bytes(size) == largest


@pytest.mark.parametrize(
    ("ranks", "changed", "expected"),
    [
        ((1, 1), {}, 4),
        ((1, 1), {"replicated_parameters": 1 << 22}, 8),
        ((1, 1), {"replicated_parameters": (1 << 17) - 1}, 1),
        ((1, 1), {"overlaps_sums": False}, 1),
        ((1, 1), {"wire": "bfloat16"}, 4),
        ((1, 1), {"element_bytes": 2}, 1),
        ((1,), {}, 1),
        ((2,), {}, 1),
    ],
)
def test_where_buckets_leave_early(ranks: tuple[int, ...], changed: dict[str, Any], expected: int) -> None:
    assert buckets_of(ranks, cluster=HOSTS, workload=replace(WORKLOAD, **changed)) == expected


def test_not_on_one_host_nor_over_links_of_different_rates() -> None:
    together = replace(HOSTS, processors=tuple(replace(each, host="h0") for each in HOSTS.processors))
    assert buckets_of((1, 1), cluster=together, workload=WORKLOAD) == 1
    three = Cluster(
        processors=tuple(
            Processor(name=f"p{rank}", speed=1e9, host=f"h{rank}", copy_bytes_per_s=rate)
            for rank, rate in enumerate((1e6, 1e9, 1e9))
        ),
        network=HOSTS.network,
    )
    assert buckets_of((1, 1, 1), cluster=three, workload=WORKLOAD) == 1
    alike = replace(three, processors=tuple(replace(each, copy_bytes_per_s=1e9) for each in three.processors))
    assert buckets_of((1, 1, 1), cluster=alike, workload=WORKLOAD) == 4


def test_prices_count_what_is_left_and_all_messages() -> None:
    """1 MiB over 10 MB/s is 0.105 s; computing takes 0.4 s, so that the last of four buckets is left."""
    plain = AlphaBetaCost().price(REPLICAS, cluster=HOSTS, workload=replace(WORKLOAD, overlaps_sums=False))
    early = AlphaBetaCost().price(REPLICAS, cluster=HOSTS, workload=WORKLOAD)
    wire_s = 4 * ((1 << 18) + 2) / 1e7
    assert plain.compute == early.compute == pytest.approx(0.4)
    assert plain.gradients == pytest.approx(wire_s + 1e-3)
    assert early.gradients == pytest.approx((wire_s + 4e-3) / 4)
    dear = replace(HOSTS, processors=tuple(replace(each, message_s=1e-3) for each in HOSTS.processors))
    assert AlphaBetaCost().price(REPLICAS, cluster=dear, workload=WORKLOAD).gradients == pytest.approx(early.gradients + 8e-3)
    assert [each.gradients_s for each in timeline(REPLICAS, cluster=HOSTS, workload=WORKLOAD)] == [early.gradients] * 2
    halves = Layout(replicas=tuple(replace(each, micro_batches=2) for each in REPLICAS.replicas))
    slow = replace(WORKLOAD, replicated_parameters=1 << 22)
    once, twice = (AlphaBetaCost().price(each, cluster=HOSTS, workload=slow).gradients for each in (REPLICAS, halves))
    assert twice - once == pytest.approx(7 / 8 * 2 / 3 * 0.2), "only the last micro-batch hides anything"


@pytest.mark.parametrize(("wire", "element_bytes"), [(None, 4), ("bfloat16", 2)])
def test_a_bucket_travels_as_the_wire_says(wire: str | None, element_bytes: int) -> None:
    found = bucket_sum(("p0", "p1"), {"p0": "h0", "p1": "h1"}, size=1000, workload=replace(WORKLOAD, wire=wire))
    assert (found.schedule.size, found.element_bytes, found.wire) == (1000, element_bytes, wire)


@pytest.mark.parametrize("speed", [1.0, 6e12])
def test_nothing_is_hidden_where_computing_is_a_guess_or_on_gpus(speed: float) -> None:
    cluster = replace(HOSTS, processors=tuple(replace(each, speed=speed) for each in HOSTS.processors))
    prices = [
        AlphaBetaCost().price(REPLICAS, cluster=cluster, workload=each)
        for each in (WORKLOAD, replace(WORKLOAD, overlaps_sums=False))
    ]
    assert prices[0] == prices[1]


GPT = gpt_workload(layers=2, width=48, heads=6, tokens=16, vocabulary=100, samples=40)
PROCESSORS: st.SearchStrategy[dict[str, object]] = st.builds(
    dict,
    speed=st.floats(1e6, 1e9) | st.just(SpeedTable([(1e6, 1e7), (1e9, 1e8)])),
    host=st.sampled_from("ab"),
    spread=st.none() | st.floats(0, 0.5),
    message_s=st.sampled_from([0.0, 1e-3]),
    call_s=st.sampled_from([0.0, 1e-3]),
    step_s=st.sampled_from([0.0, 1.0]),
    copy_bytes_per_s=st.sampled_from([1e6, 1e9]),
)


@given(
    drawn=st.lists(PROCESSORS, min_size=1, max_size=5), workload=st.sampled_from([GPT, Workload.mlp(20, 30, 10, samples=50)])
)
@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_the_parts_of_every_processor_sum_to_the_price(drawn: list[dict[str, object]], workload: Workload) -> None:
    cluster = Cluster(processors=tuple(Processor(name=f"p{i}", **each) for i, each in enumerate(drawn)))  # type: ignore[arg-type]
    found = plan(cluster=cluster, workload=workload, idle=True)
    times = timeline(found.layout, cluster=cluster, workload=workload)
    assert [each.processor for each in times] == list(found.layout.processors)
    for each in times:
        parts_s = (each.compute_s, each.sums_s, each.gradients_s, each.wait_s)
        assert min(parts_s) >= 0
        assert sum(parts_s) == pytest.approx(found.predicted_s, rel=1e-9)
        assert each.send_s == each.sums_s + each.gradients_s
    assert max(each.gradients_s for each in times) == pytest.approx(found.predicted.gradients)
    assert max(each.sums_s for each in times) == pytest.approx(found.predicted.tensor_parallel)
    assert max(each.compute_s for each in times) <= found.predicted.compute * (1 + 1e-9)


def test_who_has_less_to_do_waits() -> None:
    """Equal shares for speeds 1 and 3: the fast one waits as long as it would compute twice more."""
    layout = Layout(replicas=tuple(Replica(width=0.5, processors=(name,), heights=(1.0,)) for name in ("slow", "fast")))
    cluster = Cluster(
        processors=(
            Processor(name="slow", speed=1.0, link=OwnLink(bandwidth_bytes_per_s=1e6, latency_s=0.0)),
            Processor(name="fast", speed=3.0),
        )
    )
    workload = Workload.mlp(30, 40, 10, samples=100)
    cost = AlphaBetaCost(flop_per_s=1e6)
    slow, fast = timeline(layout, cluster=cluster, workload=workload, cost=cost)
    assert (slow.compute_s, fast.compute_s) == pytest.approx((workload.flop(width=0.5, height=1.0) / 1e6, slow.compute_s / 3))
    assert slow.sums_s == fast.sums_s == 0
    assert fast.gradients_s == pytest.approx(slow.gradients_s)
    assert fast.gradients_s >= 4 * 1600 / 1e6, "the pace of the slow one's link"
    assert (slow.wait_s, fast.wait_s) == pytest.approx((0.0, 2 * fast.compute_s))
