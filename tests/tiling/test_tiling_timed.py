"""The planner by time: what it leaves out, one machine alone, and the advice it gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor
from tatami.tiling import PLANNERS, Advice, AlphaBetaCost, advise, alone_warning, compare
from tatami.tiling.timed import balanced
from tatami.workload import Workload, gpt_workload

SLOW_NETWORK = Link(bandwidth_bytes_per_s=1e6, latency_s=1e-3)


@given(
    drawn=st.lists(st.tuples(st.floats(0.1, 10.0), st.sampled_from("abc")), min_size=1, max_size=8),
    net=st.tuples(st.integers(1, 300), st.integers(30, 300), st.integers(1, 300)),
    flop_per_s=st.sampled_from([1e8, 1e10, 1e12]),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_no_planner_is_faster(drawn: list[tuple[float, str]], net: tuple[int, int, int], flop_per_s: float) -> None:
    processors = tuple(Processor(name=f"p{i}", speed=speed, host=host) for i, (speed, host) in enumerate(drawn))
    plans = compare(
        ["timed", "even", "grid", "grid-rev", "srpm", "weighted"],
        cluster=Cluster(processors=processors),
        workload=Workload.mlp(*net, samples=500),
        cost=AlphaBetaCost(flop_per_s=flop_per_s),
    )
    if not any(one.left_out for one in plans):
        assert plans[0].predicted_s <= min(one.predicted_s for one in plans)


def test_replicas_stay_on_a_host_where_the_network_is_slow_and_tensor_parallel_sums_are_large() -> None:
    # Ascending order would pair p0 with p2 and p1 with p3, across the network.
    processors = tuple(Processor(name=f"p{i}", speed=speed, host="ab"[i % 2]) for i, speed in enumerate([1.0, 2.0, 1.1, 2.1]))
    cluster = Cluster(processors=processors, network=SLOW_NETWORK)
    workload = Workload.mlp(10, 400, 100, samples=20_000)
    cost = AlphaBetaCost(flop_per_s=1e12)
    timed, srpm = (PLANNERS[name].layout(cluster=cluster, workload=workload, cost=cost) for name in ("timed", "srpm"))
    hosts = [{cluster.by_name[name].host for name in replica.processors} for replica in timed.replicas]
    assert hosts == [{"a"}, {"b"}]
    prices = [cost.price(layout, cluster=cluster, workload=workload).total for layout in (timed, srpm)]
    assert prices[0] < prices[1]


def test_balanced_tiles_compute_for_the_same_time() -> None:
    processors = Cluster.from_speeds([0.5, 1.0, 2.0, 3.0]).processors
    workload = Workload.mlp(203, 80, 26, samples=1024)
    layout = balanced([processors[:3], processors[3:]], workload=workload)
    assert layout is not None
    elapsed = [
        workload.flop(width=replica.width, height=height) / processors[int(name[1])].speed
        for replica in layout.replicas
        for name, height in zip(replica.processors, replica.heights, strict=True)
    ]
    assert elapsed == pytest.approx([elapsed[0]] * 4)


def test_a_processor_slower_than_what_a_replica_repeats_has_no_balance() -> None:
    processors = Cluster.from_speeds([1e-9, 1.0]).processors
    assert balanced([processors], workload=Workload.mlp(203, 80, 26, samples=1024)) is None


GPT = gpt_workload(layers=6, width=384, heads=6, tokens=256, vocabulary=512, samples=48)


def home(*, bandwidth_bytes_per_s: float, speed: float = 1.0) -> Cluster:
    machines = {"desktop": 60e9, "laptop": 40e9}
    return Cluster(
        processors=tuple(Processor(name=name, speed=own * speed) for name, own in machines.items()),
        network=Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=1e-4),
    )


def told(cluster: Cluster, *, workload: Workload = GPT, cost: AlphaBetaCost | None = None) -> str | None:
    (weighted,) = compare(["weighted"], cluster=cluster, workload=workload, cost=cost)
    return alone_warning(weighted, cluster=cluster, cost=cost)


def test_one_machine_alone_that_is_as_fast_is_named_with_what_to_do() -> None:
    text = told(home(bandwidth_bytes_per_s=1e6))
    assert text is not None
    assert text.startswith("desktop alone is predicted to take 14.7 s an iteration, and this plan of 2 ranks ")
    assert "train on that machine alone, or give more samples" in text


@pytest.mark.parametrize(
    ("cluster", "cost"),
    [
        (home(bandwidth_bytes_per_s=1e9), None),
        (home(bandwidth_bytes_per_s=1e6, speed=1e-10), None),
        (Cluster.from_speeds([6e10]), None),
    ],
    ids=["faster together", "relative speeds", "one machine"],
)
def test_nothing_is_said_where_it_pays_or_is_a_guess(cluster: Cluster, cost: AlphaBetaCost | None) -> None:
    assert told(cluster, cost=cost) is None


def test_relative_speeds_are_known_where_it_is_said_what_they_are_of() -> None:
    assert told(home(bandwidth_bytes_per_s=1e6, speed=1e-10), cost=AlphaBetaCost(flop_per_s=1e10)) is not None


def test_rho_and_q_of_the_papers_perceptron() -> None:
    """Eight processors, 229 x 800 weights and 26 x 1,024 outputs; 100 ms of exchange for each 50 ms of computing."""
    workload = Workload.mlp(203, 800, 26, samples=1024)
    (weighted,) = compare(["weighted"], cluster=Cluster.from_speeds([1.0] * 8), workload=workload)
    advice = advise(weighted)
    assert advice.rho == pytest.approx(8 * 229 * 800 / (26 * 1024))
    assert advice.q == weighted.predicted.gradients / weighted.predicted.compute


def test_the_gain_of_the_rule() -> None:
    assert Advice(rho=64.0, q=1.0).gain == pytest.approx(2 / 1.25)
    assert Advice(rho=1.0, q=1.0).gain == 1.0
    assert Advice(rho=0.0, q=1.0).gain == 1.0


def test_each_case_has_its_sentence() -> None:
    clear = Advice(rho=64.0, q=1.0).sentence(1.4)
    assert clear.startswith("Use two-dimensional tiles: rho = 64 (weights over outputs), q = 1 (exchange over computing)")
    assert clear.endswith("promise 1.6 x the speed of weighted data parallelism.")
    no, predicted = Advice(rho=64.0, q=0.1).sentence(1.01), Advice(rho=2.0, q=0.1).sentence(1.2)
    assert no.startswith(
        "Weighted data parallelism does about as well; by the rule of thumb tiles pay where rho is at least 32 "
    )
    assert predicted.startswith("Tiles are predicted to be 1.20 x as fast as weighted data parallelism, although by the rule")
    rows = Advice(rho=2.0, q=0.1).sentence(1.2, has_replicas=False)
    assert rows.startswith(
        "Fewer machines, or other shares of the samples, are predicted to be 1.20 x as fast as weighted data parallelism; "
    )
    assert Advice(rho=0.0, q=3.0).sentence(1.0).startswith("Nothing in this network splits over units")
    for told in (clear, no, predicted):
        assert told.endswith(".")
        assert "\n" not in told


@pytest.mark.parametrize("samples", [1024, 2048, 4096])
def test_where_the_rule_promises_much_so_does_the_prediction(samples: int) -> None:
    processors = tuple(Processor(name=f"p{index}", speed=2e10, host=f"h{index}") for index in range(16))
    cluster = Cluster(processors=processors, network=Link(bandwidth_bytes_per_s=2e7, latency_s=5e-5))
    workload = Workload.mlp(1024, 4096, 1024, samples=samples)
    weighted, timed = compare(["weighted", "timed"], cluster=cluster, workload=workload, cost=AlphaBetaCost())
    advice = advise(weighted)
    assert advice.rho >= 32
    assert advice.q >= 0.5
    assert advice.gain > 1.3
    assert weighted.predicted_s / timed.predicted_s > 0.7 * advice.gain


def test_a_network_without_blocks() -> None:
    workload = Workload(samples=64, replicated_parameters=1000, replicated_flop_per_sample=10**6)
    (weighted,) = compare(["weighted"], cluster=Cluster.from_speeds([1.0] * 4), workload=workload)
    assert advise(weighted).rho == 0
