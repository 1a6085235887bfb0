"""Speeds become shares of cores, and hosts get names and addresses: decided without root, on any system."""

import ipaddress
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, OwnLink, Processor
from tatami.errors import ClusterError, InputError
from tatami.lab import plan_lab
from tatami.lab.groups import quota_and_period_us
from tatami.lab.network import Network, ShapedDevice, rate_commands, shaping_commands
from tatami.lab.plan import FULLEST, LARGEST_SHARE, switch_address

NETWORK = Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6)
FAST = Link(bandwidth_bytes_per_s=1.25e9, latency_s=2e-3)


def cluster_of(*hosts: str, speeds: tuple[float, ...] | None = None) -> Cluster:
    """One processor on each of the hosts named."""
    each = speeds or (1.0,) * len(hosts)
    processors = tuple(
        Processor(name=f"p{i}", speed=speed, host=host) for i, (host, speed) in enumerate(zip(hosts, each, strict=True))
    )
    return Cluster(processors=processors, network=NETWORK)


def test_the_sum_of_the_quotas_is_scaled_to_the_cores() -> None:
    plan = plan_lab(cluster_of("a", "b", "c", speeds=(2.0, 1.0, 1.0)), cores=1.0)
    assert plan.quotas == pytest.approx((0.45, 0.225, 0.225))
    assert plan.describe() == (
        "lab: 3 hosts, 3 processors; scale: the fastest processor (speed 2) is 0.45 of a core, all together are 0.9 of 1 cores"
    )


def test_no_rank_gets_more_than_one_core() -> None:
    assert plan_lab(cluster_of("a", "b", speeds=(1e10, 5e9)), cores=64.0).quotas == pytest.approx((0.95, 0.475))


@given(st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=12), st.floats(min_value=0.1, max_value=256.0))
def test_quotas_are_in_proportion_and_fit(speeds: list[float], cores: float) -> None:
    plan = plan_lab(cluster_of(*(f"h{i}" for i in range(len(speeds))), speeds=tuple(speeds)), cores=cores)
    for quota, speed in zip(plan.quotas, speeds, strict=True):
        assert quota / plan.quotas[0] == pytest.approx(speed / speeds[0])
    total = math.fsum(plan.quotas)
    assert max(plan.quotas) <= LARGEST_SHARE * (1 + 1e-9)
    assert total <= FULLEST * cores * (1 + 1e-9)
    # As large as they can be: one of the two limits is reached.
    assert max(max(plan.quotas) / LARGEST_SHARE, total / (FULLEST * cores)) == pytest.approx(1.0)


@given(st.floats(min_value=1e-4, max_value=1.0))
def test_a_quota_is_what_the_kernel_takes(cores: float) -> None:
    quota_us, period_us = quota_and_period_us(cores)
    assert quota_us >= 1000
    assert 10_000 <= period_us <= 10_000_000
    assert quota_us / period_us == pytest.approx(cores, rel=1e-3)


def test_hosts_have_addresses_of_a_private_range_and_their_processors() -> None:
    plan = plan_lab(cluster_of("a", "b", "a"), cores=2.0)
    assert [(host.name, host.address, host.processors) for host in plan.hosts] == [
        ("a", "10.77.0.1", (0, 2)),
        ("b", "10.77.0.2", (1,)),
    ]
    assert ipaddress.ip_address(plan.hosts[0].address).is_private
    assert switch_address() == "10.77.255.254"


def test_links_that_are_not_as_the_network_is() -> None:
    cluster = Cluster(
        processors=cluster_of("a", "b", "c").processors, network=NETWORK, links={("a", "b"): FAST, ("c", "c"): FAST}
    )
    plan = plan_lab(cluster, cores=2.0)
    assert plan.exceptions(plan.by_name["a"]) == {"b": FAST}
    assert plan.exceptions(plan.by_name["b"]) == {"a": FAST}
    assert plan.exceptions(plan.by_name["c"]) == {}
    assert plan.link("b", "a") == FAST
    assert plan.link("b", "c") == NETWORK
    assert plan.longest_latency_s() == 2e-3


def test_links_of_hosts_are_shaped_where_they_end_and_have_the_latency_of_the_network() -> None:
    own = OwnLink(bandwidth_bytes_per_s=1e6)
    first, *others = cluster_of("a", "b", "c").processors
    plan = plan_lab(Cluster(processors=(replace(first, link=own), *others), network=NETWORK), cores=2.0)
    assert plan.exceptions(plan.by_name["b"]) == {}
    assert plan.link("a", "b") == own.over(NETWORK)
    late = replace(first, link=OwnLink(latency_s=1.0))
    with pytest.raises(ClusterError, match=f"the links of {first.name} have latencies of their own"):
        plan_lab(Cluster(processors=(late, *others), network=NETWORK), cores=2.0)


def test_a_latency_that_a_lab_has_anyhow_is_none_to_emulate() -> None:
    assert plan_lab(cluster_of("a", "b"), cores=2.0).longest_latency_s() == 0.0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("localhost", 'give each processor a `host` of its own name, as host = "h{i}"'),
        ("switch", "what the lab calls the machine between the hosts"),
        ("a b", "is not a host name"),
        ("../etc", "is not a host name"),
        ("-h", "is not a host name"),
        ("a;reboot", "is not a host name"),
        ("a\n", "is not a host name"),
        ("x" * 64, "is not a host name"),
        ("10.0.0.1", "would be read as an address"),
        ("A", "are the same name: case does not count"),
    ],
)
def test_names_that_no_host_can_have(name: str, problem: str) -> None:
    with pytest.raises(ClusterError) as caught:
        plan_lab(cluster_of("a", name, "b"), cores=1.0)
    assert any(problem in line for line in caught.value.problems)


def test_all_names_that_cannot_be_are_told_at_once() -> None:
    with pytest.raises(ClusterError) as caught:
        plan_lab(cluster_of("a b", "c", "d/e"), cores=1.0)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("cores", [0.0, -1.0, math.nan, math.inf])
def test_cores_that_cannot_be(cores: float) -> None:
    with pytest.raises(InputError, match="cores must be a finite number > 0"):
        plan_lab(cluster_of("a"), cores=cores)


def test_a_host_has_the_memory_of_its_processors_and_a_base_for_each() -> None:
    plain = cluster_of("a", "b", "a")
    memories = (100, 200, 400)
    cluster = replace(
        plain, processors=tuple(replace(p, memory_bytes=m) for p, m in zip(plain.processors, memories, strict=True))
    )
    assert [host.memory_bytes for host in plan_lab(cluster, cores=2.0, base_bytes=10).hosts] == [520, 210]
    assert [host.memory_bytes for host in plan_lab(cluster, cores=2.0).hosts] == [None, None]
    with pytest.raises(ClusterError, match="processor 'p0' has no memory, and the lab is to limit it: give it one"):
        plan_lab(plain, cores=2.0, base_bytes=10)


SLOW = Link(bandwidth_bytes_per_s=12.5e6, latency_s=1e-3)
FAST_LINK = Link(bandwidth_bytes_per_s=1.25e9, latency_s=0.0)


def wire(*, exceptions: dict[int, Link]) -> ShapedDevice:
    return ShapedDevice(namespace="tatami-1-a", device="eth0", match="dst", network=SLOW, exceptions=exceptions)


def lines(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def test_one_class_for_the_network_and_one_for_each_exception() -> None:
    assert lines(shaping_commands(wire(exceptions={6: FAST_LINK}), delays=False)) == [
        "ip -n tatami-1-a link set eth0 mtu 9000 gso_max_size 65536",
        "tc -n tatami-1-a qdisc add dev eth0 root handle 1: htb default 1",
        "tc -n tatami-1-a class add dev eth0 parent 1: classid 1:1 htb rate 100737595bit burst 1600 cburst 1600 quantum 60000",
        "tc -n tatami-1-a class add dev eth0 parent 1: classid 1:2 "
        "htb rate 10073759499bit burst 125000 cburst 125000 quantum 60000",
        "tc -n tatami-1-a filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst 10.77.0.7/32 flowid 1:2",
    ]


def test_each_end_of_a_cable_delays_by_half() -> None:
    delayed = lines(shaping_commands(wire(exceptions={6: FAST_LINK}), delays=True))
    assert delayed[5:] == ["tc -n tatami-1-a qdisc add dev eth0 parent 1:1 netem delay 500.0us limit 1000"]


def test_many_exceptions_have_classes_of_their_own() -> None:
    """Numbers of classes are hexadecimal."""
    commands = lines(shaping_commands(wire(exceptions=dict.fromkeys(range(1, 21), FAST_LINK)), delays=False))
    assert sum(" class add " in line for line in commands) == 21
    assert "match ip dst 10.77.0.21/32 flowid 1:15" in commands[-1]


@pytest.mark.parametrize(("bytes_per_s", "packet"), [(12.5e6, 3125), (125e6, 31250), (1.25e9, 65536)])
def test_packets_are_of_a_size_that_the_link_takes_a_moment_for(bytes_per_s: float, packet: int) -> None:
    link = Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0)
    (first, *_) = lines(shaping_commands(replace(wire(exceptions={}), network=link), delays=False))
    assert first == f"ip -n tatami-1-a link set eth0 mtu 9000 gso_max_size {packet}"


@pytest.mark.parametrize(("bytes_per_s", "mtu"), [(1e6, 1500), (12.5e6, 3125), (125e6, 9000)])
def test_slow_links_have_small_packets_which_stay_when_the_rate_changes(bytes_per_s: float, mtu: int) -> None:
    network = Network("tatami-1", delays=False)
    (host,) = plan_lab(cluster_of("a"), cores=2.0).hosts
    for rate in (bytes_per_s, 2 * bytes_per_s):
        link = Link(bandwidth_bytes_per_s=rate, latency_s=0.0)
        wires = network.wires(host, network=link, exceptions={})
        assert [each.mtu_bytes for each in wires] == [mtu, mtu]
    (command,) = rate_commands(wires[0], verb="change")
    bits = float(command[command.index("rate") + 1].removesuffix("bit"))
    assert bits * (mtu - 52) / (mtu + 14) == pytest.approx(8 * rate)


def test_rates_change_in_place() -> None:
    (changed,) = lines(rate_commands(wire(exceptions={}), verb="change"))
    assert changed.startswith("tc -n tatami-1-a class change dev eth0 parent 1: classid 1:1 htb rate 100737595bit")


@pytest.mark.parametrize(("bytes_per_s", "bits"), [(0.01, "1bit"), (1e3, "8059bit")])
def test_slow_rates_are_whole_bits(bytes_per_s: float, bits: str) -> None:
    link = Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0)
    (command,) = rate_commands(ShapedDevice(namespace="n", device="eth0", match="dst", network=link, exceptions={}), verb="add")
    assert command[command.index("rate") + 1] == bits
