"""A lab measures itself: the speed of every processor, all at once, and the rate of every link; asked against got."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tatami.errors import LabError
from tatami.lab.lab import Lab

TOLERANCE = 0.1
ROUNDS = 3
COMPUTE_S = 2.0
TRANSFER_S = 0.7
_TRANSFER_BYTES = 4 << 20
_LONGEST_TRANSFER_S = 20.0
"""A link so slow that it does not carry 4 MiB in that time is measured with less."""
_SKIP_S = 0.3
_STARTING_S = 0.5
"""For Python to start on the slowest host; it is not limited until it computes."""
_PORT = 5001
_PATIENCE_S = 60.0

_LOAD = Path(__file__).with_name("load.py")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was measured.

    Attributes:
        kind: `speed` (relative, in the cluster's own units) or `rate` (bytes/s of payload).
        name: of the processor, or `one -> other` host.
        asked: what the cluster says.
        got: the median of what was measured.
    """

    kind: str
    name: str
    asked: float
    got: float

    @property
    def error(self) -> float:
        """How far it is off, relative to what was asked."""
        return self.got / self.asked - 1

    @property
    def holds(self) -> bool:
        """Whether it is within `TOLERANCE`."""
        return abs(self.error) <= TOLERANCE


def check_speeds_of(lab: Lab, *, rounds: int = ROUNDS) -> list[Finding]:
    """The speed of every processor while all compute, as a share of what all do together.

    A machine's core is not equally fast when its neighbours are busy; that slows all hosts alike, and only ratios count.

    Raises:
        LabError: a measuring process ended without its number.
    """
    processors = lab.plan.cluster.processors
    done = [_compute_on_all(lab) for _ in range(rounds)]
    asked = math.fsum(processor.speed for processor in processors)
    shares = [[count / sum(counts) for count in counts] for counts in done]
    return [
        Finding(kind="speed", name=each.name, asked=each.speed, got=asked * statistics.median(share[rank] for share in shares))
        for rank, each in enumerate(processors)
    ]


def check_rates_of(lab: Lab, *, rounds: int = ROUNDS) -> list[Finding]:
    """The rate from every host to the next, the last to the first, and over every link that is not as the network is.

    Raises:
        LabError: a measuring process ended without its number.
    """
    findings = []
    for one, other in _pairs(lab):
        asked = lab.plan.link(one, other).bandwidth_bytes_per_s
        got = statistics.median(_transfer(lab, one, other, asked=asked) for _ in range(rounds))
        findings.append(Finding(kind="rate", name=f"{one} -> {other}", asked=asked, got=got))
    return findings


def check_lab(lab: Lab, *, said: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """All that can be measured of a lab, in seconds to a minute; `said` is told what is measured next.

    Raises:
        LabError: a measuring process ended without its number.
    """
    said(f"speeds: all processors compute at once, {ROUNDS} times {COMPUTE_S:g} s")
    speeds = check_speeds_of(lab)
    said(f"rates: TCP over one link after the other, {ROUNDS} times each")
    return speeds + check_rates_of(lab)


def _compute_on_all(lab: Lab) -> list[int]:
    start_s = time.monotonic() + _STARTING_S
    words = [sys.executable, "-I", "-S", str(_LOAD), "compute", repr(start_s), repr(COMPUTE_S)]
    names = [processor.name for processor in lab.plan.cluster.processors]
    started = [lab.spawn(name, words, stdout=subprocess.PIPE) for name in names]
    return [max(1, int(_number(process, f"the computation on {name}"))) for name, process in zip(names, started, strict=True)]


def _transfer(lab: Lab, one: str, other: str, *, asked: float) -> float:
    """Bytes per second from `one` to `other`; at the machine's full speed, for a link is to be measured and not a host."""
    duration_s = max(TRANSFER_S, min(_LONGEST_TRANSFER_S, _TRANSFER_BYTES / asked))
    load = [sys.executable, "-I", "-S", str(_LOAD)]
    receive = [*load, "receive", str(_PORT), repr(_SKIP_S), repr(duration_s)]
    receiver = lab.spawn(other, receive, limited=False, stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    sender = lab.spawn(one, [*load, "send", other, str(_PORT)], limited=False)
    rate = _number(receiver, f"the transfer from {one} to {other}")
    sender.wait(_PATIENCE_S)
    return rate


def _number(process: subprocess.Popen[bytes], what: str) -> float:
    output, _ = process.communicate(timeout=_PATIENCE_S)
    if process.returncode != 0:
        raise LabError(f"{what} ended with exit code {process.returncode}, so there is nothing to compare")
    return float(output.split()[-1])


def _pairs(lab: Lab) -> Iterator[tuple[str, str]]:
    names = [host.name for host in lab.plan.hosts]
    if len(names) == 1:
        return
    ring = list(zip(names, [*names[1:], names[0]], strict=True))
    yield from ring
    for host in lab.plan.hosts:
        yield from ((host.name, other) for other in lab.plan.exceptions(host) if (host.name, other) not in ring)
