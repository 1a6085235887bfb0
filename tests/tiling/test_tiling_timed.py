"""The planner by time: what it leaves out, one machine alone, and the advice it gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor, SpeedTable
from tatami.planning import compared
from tatami.sim.tiling import Floor
from tatami.tiling import (
    FEW,
    PLANNERS,
    Advice,
    AlphaBetaCost,
    advise,
    alone_warning,
    at_equal_times,
    at_tiles,
    compare,
    find_planner,
    plan,
    tile_flop,
    with_speeds,
)
from tatami.tiling.compute import evened
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
    assert text.startswith("desktop alone is predicted to take 15.9 s an iteration, and this plan of 2 ranks ")
    assert "train on that machine alone, or give more samples" in text


@pytest.mark.parametrize(
    ("cluster", "cost"),
    [
        (home(bandwidth_bytes_per_s=1e9), None),
        (Cluster.from_speeds([1.0, 0.5]), None),
        (Cluster.from_speeds([6e10]), None),
    ],
    ids=["faster together", "relative speeds on one host", "one machine"],
)
def test_nothing_is_said_where_it_pays_or_is_a_guess(cluster: Cluster, cost: AlphaBetaCost | None) -> None:
    assert told(cluster, cost=cost) is None


def test_relative_speeds_of_several_hosts_are_warned_about() -> None:
    text = told(home(bandwidth_bytes_per_s=1e6, speed=1e-10))
    assert text is not None
    assert text.startswith(
        "speeds are relative numbers, so this plan cannot compare computing with messages between the 2 hosts"
    )
    assert "Leave speeds out" in text


def test_relative_speeds_are_known_where_it_is_said_what_they_are_of() -> None:
    text = told(home(bandwidth_bytes_per_s=1e6, speed=1e-10), cost=AlphaBetaCost(flop_per_s=1e10))
    assert text is not None
    assert text.startswith("desktop alone")


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


WORK = Workload.mlp(203, 800, 26, samples=4096)
FLOP = WORK.flop(width=1.0, height=1.0)
OUTGROWN = SpeedTable([(FLOP / 4, 2.0), (FLOP, 1.0)])
"""A quarter of the work takes an eighth of the time of a processor of speed 1, all of it as long."""


def test_areas_are_such_that_all_take_the_same_time() -> None:
    plain = at_equal_times(Cluster.from_speeds([1.0, OUTGROWN]), workload=WORK)
    # 1/8 + 7/6 (x - 1/4) = 1 - x at x = 7/13.
    assert list(plain.speeds.values()) == pytest.approx([1.0, 7 / 6])
    assert plain.sized == ()


def test_data_parallel_shares_and_their_price_follow_the_table() -> None:
    cluster = Cluster.from_speeds([1.0, OUTGROWN])
    found = plan("weighted", cluster=cluster, workload=WORK)
    assert [replica.width for replica in found.layout.replicas] == pytest.approx([6 / 13, 7 / 13], rel=1e-6)
    assert found.predicted.compute == pytest.approx(6 / 13 * FLOP / 1e9, rel=1e-3)
    assert list(at_tiles(cluster, found.layout, workload=WORK).speeds.values()) == pytest.approx([1.0, 7 / 6], rel=1e-3)
    assert sum(tile_flop(found.layout, workload=WORK).values()) == pytest.approx(FLOP)


def test_a_table_of_one_speed_is_that_speed() -> None:
    flat = SpeedTable([(1e3, 0.5), (1e9, 0.5)])
    by_table = plan(cluster=Cluster.from_speeds([1.0, flat, 0.25]), workload=WORK)
    by_number = plan(cluster=Cluster.from_speeds([1.0, 0.5, 0.25]), workload=WORK)
    assert by_table.tiling == by_number.tiling
    assert by_table.predicted_s == pytest.approx(by_number.predicted_s, rel=1e-9)


def test_planning_with_one_number_for_all_sizes_is_slower() -> None:
    cluster = Cluster.from_speeds([1.0, 1.0, OUTGROWN])
    taken = plan("timed", cluster=cluster, workload=WORK)
    for number in (1.0, 2.0):
        other = plan("timed", cluster=with_speeds(cluster, [1.0, 1.0, number]), workload=WORK)
        assert taken.predicted_s < AlphaBetaCost().price(other.layout, cluster=cluster, workload=WORK).total * 0.97


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_timed_is_never_worse_than_another_planner_and_never_below_the_bound(data: st.DataObject) -> None:
    shares = st.floats(0.02, 1.0)
    speeds: list[float] = []
    for _ in range(data.draw(st.integers(2, 5))):
        speed, slower = data.draw(st.floats(0.2, 4.0)), data.draw(st.floats(0.3, 1.0))
        knee = data.draw(shares) * FLOP / 4
        # Never faster than in proportion: small tiles slower (a GPU), or large ones (a cache).
        low = slower * speed if data.draw(st.booleans()) else speed
        speeds.append(SpeedTable([(knee, low), (4 * knee, speed if low < speed else slower * speed)]))
    cluster = Cluster.from_speeds(speeds)
    found = plan("timed", cluster=cluster, workload=WORK)
    for other in compare(["even", "srpm", "srpm-merged", "weighted"], cluster=cluster, workload=WORK):
        assert found.predicted_s <= other.predicted_s * (1 + 1e-9)
    assert found.predicted_s >= found.bound_s * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(
    machines=st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(0.5, 4.0)), min_size=2, max_size=8), samples=st.integers(16, 60)
)
def test_few_samples_are_divided_by_the_times_of_whole_ones(machines: list[tuple[float, float]], samples: int) -> None:
    """Each pass takes a constant time as well, so that few samples are slow. No single sample could move to better effect."""
    work = Workload.mlp(20, 8, 4, samples=samples)
    flop = work.flop(width=1.0, height=1.0) / samples

    def takes_s(number: int, machine: tuple[float, float]) -> float:
        return (machine[0] + number * machine[1]) * 1e-3 if number else 0.0

    sizes = (1, 2, 4, 8, 16, 64)
    speeds = [SpeedTable((k * flop, k * flop / takes_s(k, each)) for k in sizes) for each in machines]
    cluster = Cluster.from_speeds(speeds)
    layout = find_planner("weighted").layout(cluster=cluster, workload=work, cost=AlphaBetaCost())
    first, found = layout.sample_sizes(samples), evened(layout, cluster=cluster, workload=work, flop_per_s=1.0)
    last = found.sample_sizes(samples)
    assert sum(last) == samples
    if samples >= FEW * len(machines) or not all(first):
        assert found is layout
        return
    times = [takes_s(*each) for each in zip(last, machines, strict=True)]
    assert max(times) <= max(takes_s(*each) for each in zip(first, machines, strict=True)) * (1 + 1e-9)
    giver = times.index(max(times))
    others = [takes_s(size + 1, each) for index, (size, each) in enumerate(zip(last, machines, strict=True)) if index != giver]
    assert last[giver] == 1 or min(others) >= times[giver] * (1 - 1e-6)


def test_planners_that_know_one_number_only_plan_with_speeds_at_which_all_take_as_long() -> None:
    cluster = Cluster.from_speeds([1.0, OUTGROWN])
    plain = at_equal_times(cluster, workload=WORK)
    found = {each.planner: each for each in compare(cluster=cluster, workload=WORK)}
    assert list(found) == ["even", "grid", "grid-rev", "srpm", "srpm-merged", "weighted", "timed"]
    for name in ("grid", "grid-rev"):
        assert found[name].layout == plan(name, cluster=plain, workload=WORK).layout
        here = at_tiles(cluster, found[name].layout, workload=WORK)  # priced at the speeds of its tiles
        assert found[name].predicted_s == AlphaBetaCost().price(found[name].layout, cluster=here, workload=WORK).total


def test_the_comparison_says_what_the_speeds_are() -> None:
    cluster = Cluster.from_speeds([1e9, OUTGROWN.scaled(speed=1e9)])
    text = str(compared(["timed"], cluster=cluster, workload=WORK))
    assert "speeds by the size of the tile, and under timed" in text
    assert "2 Gflop/s" in text
    assert "1.17 Gflop/s" in text or "1.16 Gflop/s" in text


def test_the_simulator_computes_at_the_speed_of_the_size() -> None:
    cluster = Cluster.from_speeds([1.0, OUTGROWN])
    layout = plan("weighted", cluster=cluster, workload=WORK).layout

    def flop(speeds: dict[str, float]) -> float:
        floor = Floor(layout, workload=WORK, cluster=cluster, speeds=speeds)
        return sum(leg.flop for leg in floor.legs[1]) + floor.update_flop[1]

    plain = flop({"p0": 1.0, "p1": 1.0})
    assert flop({"p0": 1.0, "p1": OUTGROWN}) == pytest.approx(plain / (7 / 6), rel=1e-3)
