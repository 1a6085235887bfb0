"""Hosts as network namespaces joined by a bridge, with a rate for every link.

The bridge is in a namespace too: the machine's own network has no part in a lab, sees no interface of it, and keeps its
addresses, routes and firewall to itself. Every host has one interface, eth0, whose other end is a port of the bridge.

A rate is kept at both ends of that cable: what a host sends at its eth0, what comes to it (from several at once) at its port.
At each end is an htb with one class for the network and one more for every host to which there is another link.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tatami.cluster import Link
from tatami.errors import LabError
from tatami.lab.plan import NETWORK, SWITCH, Host, switch_address

MTU_BYTES = 9000
_LEAST_MTU_BYTES = 1500
"""Packets of slow links are Ethernet's. A packet leaves when its first byte may, a wire's arrives when its last one does: with
jumbo frames, of 9 ms at 1 MB/s, each message of an idle link came so much too early."""
_HEADER_BYTES, _FRAME_BYTES = 52, 14
"""Headers of TCP and IP in a packet, and of Ethernet before it. htb counts both; the rate of a link is that of payload."""
_BURST_S = 1e-4
_SMALLEST_BURST_BYTES = 1600
"""A link that was idle lets so much through at once, and the packet that is then on its way; a wire would not. 64 KiB of
each are 10 ms of 100 Mbit/s, in which all gradients of a small network crossed for nothing."""
_PACKET_S = 2.5e-4
_LARGEST_PACKET_BYTES = 65536
"""So TCP must not hand over its packets of 64 KiB on slow links. On fast ones smaller packets would cost CPU time that network
cards save."""
_QUANTUM_BYTES = 60000
_NETWORK_CLASS = 1
_FIRST_EXCEPTION = 2


@dataclass(frozen=True, kw_only=True)
class ShapedDevice:
    """One way out of a network device: the rate of what has no class of its own, and of what goes to (or comes from) a host.

    Attributes:
        namespace: where the device is.
        device: its name.
        match: `dst` at a host's end, `src` at the port's.
        network: the link to all others.
        exceptions: the other links, by the host's index.
        mtu_bytes: the largest packet.
    """

    namespace: str
    device: str
    match: str
    network: Link
    exceptions: Mapping[int, Link]
    mtu_bytes: int = MTU_BYTES


class Network:
    """The namespaces of one lab; `prefix` is what their names begin with."""

    def __init__(self, prefix: str, *, delays: bool) -> None:
        self._prefix = prefix
        self._delays = delays
        self._mtu_bytes: dict[int, int] = {}

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def build_switch(self) -> None:
        switch = self.namespace(SWITCH)
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "set", "lo", "up")
        # The bridge is called as the hosts' interfaces are, for mpiexec is told one name for all: -iface eth0.
        call("ip", "-n", switch, "link", "add", "eth0", "mtu", str(MTU_BYTES), "type", "bridge")
        call("ip", "-n", switch, "addr", "add", f"{switch_address()}/{NETWORK.prefixlen}", "dev", "eth0")
        call("ip", "-n", switch, "link", "set", "eth0", "up")

    def build_host(self, host: Host) -> None:
        switch, own, port = self.namespace(SWITCH), self.namespace(host.name), _port(host)
        mtu = str(MTU_BYTES)
        call("ip", "netns", "add", own)
        call("ip", "-n", own, "link", "set", "lo", "up")
        ends = ("netns", switch, "type", "veth", "peer", "name", "eth0", "mtu", mtu, "netns", own)
        call("ip", "link", "add", "name", port, "mtu", mtu, *ends)
        call("ip", "-n", switch, "link", "set", port, "master", "eth0", "up")
        call("ip", "-n", own, "addr", "add", f"{host.address}/{NETWORK.prefixlen}", "dev", "eth0")
        call("ip", "-n", own, "link", "set", "eth0", "up")

    def wires(self, host: Host, *, network: Link, exceptions: Mapping[int, Link]) -> tuple[ShapedDevice, ShapedDevice]:
        """Both ends of a host's cable. Its packets are as large as at first: the other hosts have agreed on that."""
        fastest_bytes_per_s = max(link.bandwidth_bytes_per_s for link in (network, *exceptions.values()))
        mtu_bytes = self._mtu_bytes.setdefault(host.index, min(MTU_BYTES, _packet_bytes(fastest_bytes_per_s)))
        wire = partial(ShapedDevice, network=network, exceptions=exceptions, mtu_bytes=mtu_bytes)
        return (
            wire(namespace=self.namespace(host.name), device="eth0", match="dst"),
            wire(namespace=self.namespace(SWITCH), device=_port(host), match="src"),
        )

    def shape(self, wire: ShapedDevice) -> None:
        """Give a new device its queues."""
        for command in shaping_commands(wire, delays=self._delays):
            call(*command)

    def change_rate(self, wire: ShapedDevice) -> None:
        """Give a device that has its queues other rates, its packets stay as they are; nothing that is in them is lost."""
        for command in rate_commands(wire, verb="change"):
            call(*command)

    def set_link(self, host: Host, *, up: bool) -> None:
        call("ip", "-n", self.namespace(host.name), "link", "set", "eth0", "up" if up else "down")

    def remove(self, host: str) -> None:
        """Take a host's namespace away, and with it all that is in it. It may be gone already."""
        succeeds(("ip", "netns", "delete", self.namespace(host)))


def kernel_delays(probe: str) -> bool:
    """Whether the kernel can delay packets (netem); `probe` names a namespace in which to try."""
    if not succeeds(("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")):
        return False
    call("tc", "-n", probe, "qdisc", "del", "dev", "lo", "root")
    return True


def shaping_commands(wire: ShapedDevice, *, delays: bool) -> list[list[str]]:
    """The `tc` commands that make a device's queues: htb classes, filters by address, and netem in them for the latency.

    A latency is split between the two ends of a cable that a message passes: half where it leaves, half where it arrives.
    """
    tc, at = ["tc", "-n", wire.namespace], ["dev", wire.device]
    fastest_bytes_per_s = max(link.bandwidth_bytes_per_s for _, link in _classes(wire))
    sizes = ["mtu", str(wire.mtu_bytes), "gso_max_size", str(_packet_bytes(fastest_bytes_per_s))]
    commands = [["ip", "-n", wire.namespace, "link", "set", wire.device, *sizes]]
    commands.append([*tc, "qdisc", "add", *at, "root", "handle", "1:", "htb", "default", str(_NETWORK_CLASS)])
    commands += rate_commands(wire, verb="add")
    for number, (index, _) in enumerate(wire.exceptions.items(), start=_FIRST_EXCEPTION):
        address = f"{NETWORK[index + 1]}/32"
        flow = ["match", "ip", wire.match, address, "flowid", f"1:{number:x}"]
        commands.append([*tc, "filter", "add", *at, "parent", "1:", "protocol", "ip", "prio", "1", "u32", *flow])
    if delays:
        for number, link in _classes(wire):
            if link.latency_s > 0:
                delay = ["netem", "delay", f"{link.latency_s / 2 * 1e6:.1f}us", "limit", str(_waiting_packets(link))]
                commands.append([*tc, "qdisc", "add", *at, "parent", f"1:{number:x}", *delay])
    return commands


def rate_commands(wire: ShapedDevice, *, verb: str) -> list[list[str]]:
    """The `tc` commands that set the rates of a device: `verb` is `add` at first and `change` later."""
    commands = []
    around = (wire.mtu_bytes + _FRAME_BYTES) / (wire.mtu_bytes - _HEADER_BYTES)
    for number, link in _classes(wire):
        burst = str(max(_SMALLEST_BURST_BYTES, round(link.bandwidth_bytes_per_s * _BURST_S)))
        rate = ["rate", f"{max(1, round(link.bandwidth_bytes_per_s * 8 * around))}bit", "burst", burst, "cburst", burst]
        place = ["dev", wire.device, "parent", "1:", "classid", f"1:{number:x}"]
        commands.append(["tc", "-n", wire.namespace, "class", verb, *place, "htb", *rate, "quantum", str(_QUANTUM_BYTES)])
    return commands


def _packet_bytes(bytes_per_s: float) -> int:
    return min(_LARGEST_PACKET_BYTES, max(_LEAST_MTU_BYTES, round(bytes_per_s * _PACKET_S)))


def _classes(wire: ShapedDevice) -> list[tuple[int, Link]]:
    return [(_NETWORK_CLASS, wire.network), *enumerate(wire.exceptions.values(), start=_FIRST_EXCEPTION)]


def _waiting_packets(link: Link) -> int:
    """Twice as many packets as can be under way at once: netem drops any more."""
    return max(1000, round(2 * link.bandwidth_bytes_per_s * link.latency_s / 1500))


def _port(host: Host) -> str:
    return f"port{host.index}"


INSTEAD = (
    "Without a lab, tatami.testing.Slowdown plays unequal speeds on any machine, though not links and deaths: "
    "tatami train --speeds 1,1,0.5,0.25 --emulate"
)
_TIMEOUT_S = 20.0


def call(*words: str) -> str:
    """Run a program of the system, without a shell, and return what it printed.

    Raises:
        LabError: it failed; shows the command and what it said.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(words)}` did not end within {_TIMEOUT_S:g} s. {INSTEAD}") from None
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LabError(f"the lab could not be built: `{' '.join(words)}` said: {said}. {INSTEAD}")
    return done.stdout


def succeeds(words: Sequence[str]) -> bool:
    """Whether a program of the system does what it is asked; for probing, and for taking away what may be gone."""
    return subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False).returncode == 0
