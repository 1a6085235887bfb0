"""What schedules cost, and the table that chooses among them."""

import json
from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor
from tatami.collective import Fingerprint, SizeTimings, Sync, TuningTable, build, native, price, ring
from tatami.errors import InputError, ScheduleError

ALPHA_S = 1e-4
BETA_S = 1e-8
NETWORK = Link(latency_s=ALPHA_S, bandwidth_bytes_per_s=1 / BETA_S)
LOCAL = Link(latency_s=1e-6, bandwidth_bytes_per_s=4e9)


def _cluster(hosts: int, *, ranks_per_host: int = 1, links: dict[tuple[str, str], Link] | None = None) -> Cluster:
    processors = tuple(
        Processor(name=f"p{host}.{rank}", speed=1.0, host=f"h{host:03}")
        for host in range(hosts)
        for rank in range(ranks_per_host)
    )
    return Cluster(processors=processors, local=LOCAL, network=NETWORK, links=links or {})


def _hosts(cluster: Cluster) -> list[str]:
    return [processor.host for processor in cluster.processors]


@pytest.mark.parametrize("k", [2, 3, 4, 5, 8, 13])
def test_ring(k: int) -> None:
    n = 4 * k * 1000
    cost = price(ring(k, n // 4), _cluster(k))
    assert cost.total_s == pytest.approx(2 * (k - 1) * ALPHA_S + 2 * (k - 1) / k * n * BETA_S)
    assert [phase.rounds for phase in cost.phases] == [k - 1, k - 1]
    assert cost.phases[0].latency_s == pytest.approx((k - 1) * ALPHA_S)
    assert cost.phases[1].transfer_s == pytest.approx((k - 1) / k * n * BETA_S)
    assert cost.phases[0].sync_s == 0.0


@pytest.mark.parametrize("k", [2, 3, 4, 5, 7, 8, 16])
def test_halving_doubling_is_logarithmic_for_any_k(k: int) -> None:
    n = 4 * k * 1000
    cost = price(build("halving_doubling", ranks=k, size=n // 4), _cluster(k))
    assert cost.total_s == pytest.approx(2 * ceil(log2(k)) * ALPHA_S + 2 * (k - 1) / k * n * BETA_S)


@pytest.mark.parametrize(("m", "n_rows"), [(2, 8), (4, 4), (3, 5), (1, 6), (6, 1)])
def test_torus(m: int, n_rows: int) -> None:
    p = m * n_rows
    n = 4 * p * 500
    cost = price(build("torus", ranks=p, size=n // 4, grid=(m, n_rows)), _cluster(p))
    latency_s = (2 * (m - 1) + 2 * (n_rows - 1)) * ALPHA_S
    transfer_s = (2 * (m - 1) / m + 2 * (n_rows - 1) / n_rows / m) * n * BETA_S
    assert cost.total_s == pytest.approx(latency_s + transfer_s)


@pytest.mark.parametrize("k", [2, 3, 6, 8])
def test_a_native_is_priced_as_the_better_of_two(k: int) -> None:
    rounds = ceil(log2(k))
    short, long = 4 * k, 4 * k * 10**6
    small = price(native(k, short // 4), _cluster(k)).total_s
    assert small == pytest.approx(rounds * (ALPHA_S + short * BETA_S))
    large = price(native(k, long // 4), _cluster(k)).total_s
    expected = 2 * rounds * ALPHA_S + 2 * (k - 1) / k * long * BETA_S
    assert large == pytest.approx(min(expected, rounds * (ALPHA_S + long * BETA_S)))


def test_bytes_count_by_their_width() -> None:
    cluster = _cluster(4)
    wide, narrow = (price(ring(4, 4000), cluster, element_bytes=width).phases[0] for width in (4, 2))
    assert wide.transfer_s == pytest.approx(2 * narrow.transfer_s)
    assert wide.latency_s == narrow.latency_s


@pytest.mark.parametrize(
    ("sync", "sync_s"),
    [
        (Sync.FENCE, (2 + 1) * 2 * ALPHA_S),  # 2 rounds of puts among 4 ranks: 3 meetings of log2(4)
        (Sync.PSCW, 2 * ALPHA_S),
        (Sync.LOCK, 2 * ALPHA_S + 2 * ALPHA_S),
    ],
)
def test_synchronisation_of_puts_has_its_price(sync: Sync, sync_s: float) -> None:
    cost = price(build("torus_put", ranks=4, size=4000, grid=(4, 1), sync=sync), _cluster(4))
    assert cost.phases[-1].sync_s == pytest.approx(sync_s)
    assert cost.phases[-1].latency_s == pytest.approx(2 * ALPHA_S)


def test_shared_costs_bytes_over_memory_and_two_barriers() -> None:
    cluster = _cluster(1, ranks_per_host=4)
    (phase,) = price(build("shared", ranks=4, size=4 * 10**6), cluster).phases
    # each rank loads 3 parts of 4 MB and stores 3
    assert phase.transfer_s == pytest.approx(6 * 4e6 / 4e9)
    assert phase.sync_s == pytest.approx(2 * 2 * 1e-6)
    assert phase.latency_s == 0.0


def test_the_port_of_a_host_is_shared_by_its_ranks() -> None:
    cluster = _cluster(4, ranks_per_host=2)
    n = 4 * 8 * 10**5
    hierarchical = price(build("hierarchical", ranks=8, size=n // 4, hosts=_hosts(cluster)), cluster)
    network_s = sum(phase.total_s for phase in hierarchical.phases[1:3])
    assert network_s == pytest.approx(2 * 3 * ALPHA_S + 2 * 3 / 4 * n * BETA_S)
    # Columns laid inside hosts' rows instead of across them send everything over the ports: twice the bytes in the row.
    crossed = price(build("torus", ranks=8, size=n // 4, grid=(4, 2)), cluster)
    assert crossed.total_s > 1.2 * hierarchical.total_s


def test_links_of_their_own_are_looked_up() -> None:
    slow = Link(latency_s=1.0, bandwidth_bytes_per_s=1e6)
    cluster = _cluster(3, links={("h000", "h001"): slow})
    cost = price(ring(3, 3000), cluster)
    assert cost.total_s == pytest.approx(4 * (1.0 + 4000 / 1e6))
    put = price(build("torus_put", ranks=3, size=3000, grid=(3, 1)), cluster)
    assert put.phases[-1].sync_s == pytest.approx(2 * 1.0)


def test_on_many_ranks_the_torus_beats_the_ring_on_short_messages() -> None:
    cluster = _cluster(256)
    flat = price(ring(256, 1024), cluster).total_s
    published = price(build("torus_put", ranks=256, size=1024, grid=(2, 128)), cluster).total_s
    square = price(build("torus", ranks=256, size=1024, grid=(16, 16)), cluster).total_s
    assert flat / published > 1.9
    assert flat / square > 8


def test_ten_thousand_ranks_are_priced_without_unrolling() -> None:
    cluster = _cluster(10_000)
    cost = price(ring(10_000, 10**8), cluster)
    assert cost.total_s == pytest.approx(2 * 9_999 * (ALPHA_S + 4 * 10**4 * BETA_S))


def test_a_cluster_of_another_size_is_refused() -> None:
    with pytest.raises(ScheduleError, match="ring is for 4 ranks, the cluster has 3 processors"):
        price(ring(4, 4), _cluster(3))


HERE = Fingerprint(
    hosts=("node1", "node2"), ranks_per_host=(2, 2), cores=(4, 4), cpus=("A", "B"), library="MPICH 5.0", tatami="0.1.0"
)
TABLE = TuningTable(
    fingerprint=HERE,
    timings=(
        SizeTimings(size_bytes=1024, seconds={"native": 1e-6, "ring": 4e-6}),
        SizeTimings(size_bytes=4096, seconds={"native": 2e-6, "ring": 4e-6, "shared": 3e-6}),
        SizeTimings(size_bytes=1024**2, seconds={"native": 1e-3, "ring": 5e-4, "shared": 6e-4}),
    ),
)
ALL = ("native", "ring", "shared")


def test_the_fastest_of_a_measured_size() -> None:
    assert TABLE.choose(1024, among=ALL) == "native"
    assert TABLE.choose(4096, among=ALL) == "native"
    assert TABLE.choose(1024**2, among=ALL) == "ring"
    assert TABLE.choose(1024**2, among=("native", "shared")) == "shared"
    assert TABLE.choose(1024**2, among=("torus",)) is None
    assert TABLE.choose(1024**2, among=()) is None


def test_beyond_the_ends_the_nearest_size_counts() -> None:
    assert TABLE.choose(1, among=("native", "ring")) == "native"
    assert TABLE.choose(2**40, among=ALL) == "ring"


def test_between_two_sizes_times_are_interpolated_on_logarithms() -> None:
    # native rises by 500 over a factor 256, shared by 200: they meet at 3e-6 s / 2e-6 s = (500 / 200) ** share.
    share = 0.4425
    meeting_bytes = 4096 * 256**share
    assert TABLE.choose(int(meeting_bytes * 0.97), among=("native", "shared")) == "native"
    assert TABLE.choose(int(meeting_bytes * 1.03), among=("native", "shared")) == "shared"


@given(st.integers(1, 2**34), st.sets(st.sampled_from(ALL), min_size=1))
def test_it_chooses_among_what_it_may(size_bytes: int, among: set[str]) -> None:
    assert TABLE.choose(size_bytes, among=sorted(among)) in among


def test_json_both_ways() -> None:
    assert TuningTable.from_json(TABLE.to_json()) == TABLE


def test_what_changed_is_told() -> None:
    now = replace(HERE, library="Open MPI 5", cores=(4, 8))
    assert HERE.differences(now) == ["cores: 4, 4, now 4, 8", "library: MPICH 5.0, now Open MPI 5"]
    assert HERE.differences(HERE) == []


def test_clusters_of_other_hosts_or_ranks_have_other_keys() -> None:
    assert HERE.key == replace(HERE, tatami="9", cpus=("C", "C")).key
    assert HERE.key != replace(HERE, ranks_per_host=(2, 1)).key
    assert HERE.key != replace(HERE, hosts=("node1", "node3")).key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 2; this version reads 1"),
        ({"fingerprint": {}}, "KeyError: 'hosts'"),
        ({"timings": [{"size_bytes": 1024, "seconds": {"ring": -1.0}}]}, "finite number > 0, not -1.0"),
        ({"timings": [{"size_bytes": 1024, "seconds": {"ring": "fast"}}]}, "not 'fast'"),
        ({"timings": [{"size_bytes": 0, "seconds": {}}]}, "must be positive and rise"),
        ({"timings": 3}, "TypeError"),
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, object], says: str) -> None:
    record = {**json.loads(TABLE.to_json()), **change}
    with pytest.raises(InputError, match=says):
        TuningTable.from_json(json.dumps(record))


def test_a_cut_file_is_refused() -> None:
    with pytest.raises(InputError, match="not a tuning table: JSONDecodeError"):
        TuningTable.from_json(TABLE.to_json()[:50])
