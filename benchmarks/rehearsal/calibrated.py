"""From what the ranks of a lab probed to the constants of the simulation: nothing here has seen what is to be predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rehearsal.fitting_tiles import TimedTile, calibrate
from tatami.cluster import Cluster, Link, Processor
from tatami.sim.allreduce import Fragment, Software
from tatami.sim.tiling import Startup
from tatami.workload import Workload

_LONG_BYTES = 64 * 1024
"""Messages from this size on are pieces; what shorter ones take beyond their wires is their gap."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The machines as the simulator sees them.

    Attributes:
        cluster: speeds in flop/s, and the links of all pairs.
        startup: of every tile.
        software: of all-reduces, in which ranks wait for the wires most of the time: messages have a gap.
        busy: of tilings, whose ranks have no time to spare: what a message costs its processor comes on top.
    """

    cluster: Cluster
    startup: Startup
    software: Software
    busy: Software


def calibrated(found: Mapping[str, Any], *, workload: Workload) -> Calibrated:
    """Constants from a probe.

    Args:
        found: `cluster`, `tiles`, `messages` and `sums_bytes_per_s`, as `rank` writes them.
        workload: whose tiles were timed.
    """
    timings = [[TimedTile(units=units, samples=samples, seconds=s) for units, samples, s in tiles] for tiles in found["tiles"]]
    fitted = calibrate(timings, workload=workload)
    links = {
        (one, other): Link(bandwidth_bytes_per_s=rate, latency_s=latency_s)
        for one, other, rate, latency_s in found["cluster"]["links"]
    }
    slowest = min(links.values(), key=lambda link: link.bandwidth_bytes_per_s)
    processors = tuple(
        Processor(name=f"p{rank}", speed=speed, host=host)
        for rank, (speed, host) in enumerate(zip(fitted.flop_per_s, found["cluster"]["hosts"], strict=True))
    )
    gap_s = next(each["median_s"] for each in found["messages"] if each["way"] == "shift" and each["size_bytes"] < _LONG_BYTES)
    pieces = _pieces(found["messages"], link=slowest)
    sum_bytes_per_s = min(found["sums_bytes_per_s"])
    return Calibrated(
        cluster=Cluster(processors=processors, network=slowest, links=links),
        startup=fitted.startup,
        software=Software(gap_s=gap_s, pieces=pieces, sum_bytes_per_s=sum_bytes_per_s),
        busy=Software(message_s=gap_s, pieces=pieces, sum_bytes_per_s=sum_bytes_per_s),
    )


def _pieces(messages: Sequence[Mapping[str, Any]], *, link: Link) -> tuple[Fragment, ...]:
    seconds = {(each["way"], each["size_bytes"]): each["median_s"] for each in messages if each["size_bytes"] >= _LONG_BYTES}
    return tuple(
        Fragment(
            size_bytes=size_bytes,
            beyond_s=max(0.0, shift_s - link.transfer_s(size_bytes)),
            stagger_s=max(0.0, seconds["exchange", size_bytes] - shift_s),
        )
        for (way, size_bytes), shift_s in sorted(seconds.items(), key=lambda item: item[0][1])
        if way == "shift"
    )
