"""The commands that give links their rates and, where the kernel can, their latencies."""

from dataclasses import replace

import pytest

from tatami.cluster import Link
from tatami.lab.network import ShapedDevice, rate_commands, shaping_commands

SLOW = Link(bandwidth_bytes_per_s=12.5e6, latency_s=1e-3)
FAST = Link(bandwidth_bytes_per_s=1.25e9, latency_s=0.0)


def wire(*, exceptions: dict[int, Link]) -> ShapedDevice:
    return ShapedDevice(namespace="tatami-1-a", device="eth0", match="dst", network=SLOW, exceptions=exceptions)


def lines(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def test_one_class_for_the_network_and_one_for_each_exception() -> None:
    assert lines(shaping_commands(wire(exceptions={6: FAST}), delays=False)) == [
        "ip -n tatami-1-a link set eth0 gso_max_size 65536",
        "tc -n tatami-1-a qdisc add dev eth0 root handle 1: htb default 1",
        "tc -n tatami-1-a class add dev eth0 parent 1: classid 1:1 htb rate 100000000bit burst 1600 cburst 1600 quantum 60000",
        "tc -n tatami-1-a class add dev eth0 parent 1: classid 1:2 "
        "htb rate 10000000000bit burst 125000 cburst 125000 quantum 60000",
        "tc -n tatami-1-a filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst 10.77.0.7/32 flowid 1:2",
    ]


def test_each_end_of_a_cable_delays_by_half() -> None:
    delayed = lines(shaping_commands(wire(exceptions={6: FAST}), delays=True))
    assert delayed[5:] == ["tc -n tatami-1-a qdisc add dev eth0 parent 1:1 netem delay 500.0us limit 1000"]


def test_many_exceptions_have_classes_of_their_own() -> None:
    """Numbers of classes are hexadecimal."""
    commands = lines(shaping_commands(wire(exceptions=dict.fromkeys(range(1, 21), FAST)), delays=False))
    assert sum(" class add " in line for line in commands) == 21
    assert "match ip dst 10.77.0.21/32 flowid 1:15" in commands[-1]


@pytest.mark.parametrize(("bytes_per_s", "packet"), [(12.5e6, 9000), (125e6, 31250), (1.25e9, 65536)])
def test_packets_are_of_a_size_that_the_link_takes_a_moment_for(bytes_per_s: float, packet: int) -> None:
    link = Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0)
    (first, *_) = lines(shaping_commands(replace(wire(exceptions={}), network=link), delays=False))
    assert first == f"ip -n tatami-1-a link set eth0 gso_max_size {packet}"


def test_rates_change_in_place() -> None:
    (changed,) = lines(rate_commands(wire(exceptions={}), verb="change"))
    assert changed.startswith("tc -n tatami-1-a class change dev eth0 parent 1: classid 1:1 htb rate 100000000bit")


@pytest.mark.parametrize(("bytes_per_s", "bits"), [(0.01, "1bit"), (1e3, "8000bit")])
def test_slow_rates_are_whole_bits(bytes_per_s: float, bits: str) -> None:
    link = Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0)
    (command,) = rate_commands(ShapedDevice(namespace="n", device="eth0", match="dst", network=link, exceptions={}), verb="add")
    assert command[command.index("rate") + 1] == bits
