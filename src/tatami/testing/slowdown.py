"""A rank made slower, so that one machine can play several unequal ones."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from tatami.clock import Clock, SystemClock
from tatami.cluster import check_speeds
from tatami.errors import InputError

MOST_TIMES_SLOWER = 10_000
FULLEST = 0.7
"""Emulated ranks keep their cores busy for at most this share of the time, so that they seldom wait for a core."""


@final
class Slowdown:
    """A `tatami.clock.Pace` that makes local compute take `factor` times as long as it did.

    At the end of each stretch it sleeps (factor - 1) times the compute time it has just measured. What it measures is the CPU
    time of the thread: polling for messages is outside of any stretch, and time for which the rank had lost its core is taken
    off the sleep, so that it is not slowed twice. What one sleep took too long, the next ones make up for.

    Args:
        factor: 1 for full speed, 3 for a third of it; may be set during a run (`slowdown.factor = 3`).
        clock: for tests.
        cpu_s: seconds of CPU time of this thread, for tests.

    Raises:
        InputError: a factor below 1, or not finite.
    """

    def __init__(
        self, factor: float = 1.0, *, clock: Clock | None = None, cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        self.factor = factor
        self._clock = clock or SystemClock()
        self._cpu_s = cpu_s
        self._overslept_s = 0.0
        self.begin()

    @property
    def factor(self) -> float:
        """How many times as long compute takes."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        if not (math.isfinite(factor) and factor >= 1):
            raise InputError(f"a slowdown's factor must be a finite number >= 1, not {factor}: a rank cannot be made faster")
        self._factor = float(factor)

    def begin(self) -> None:
        """A stretch of local compute begins."""
        self._began_s = self._clock.now_s()
        self._began_cpu_s = self._cpu_s()

    def end(self) -> None:
        """The stretch is over: sleep until it has lasted `factor` times its compute time."""
        compute_s = self._cpu_s() - self._began_cpu_s
        now_s = self._clock.now_s()
        missing_s = max(0.0, self._factor * compute_s - (now_s - self._began_s))
        sleep_s = missing_s - self._overslept_s
        if sleep_s > 0:
            self._clock.sleep(sleep_s)
            self._overslept_s = self._clock.now_s() - now_s - sleep_s
        else:
            self._overslept_s -= missing_s


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """How ranks of one machine play machines of given speeds.

    Attributes:
        factors: of every rank's `Slowdown`.
        scale: how many times slower the fastest rank is than a core of this machine: everything takes so many times as long as
            it would on machines of these speeds.
    """

    factors: tuple[float, ...]
    scale: float


def emulated_factors(speeds: Sequence[float], *, cores: int | None = None) -> Emulation:
    """Factors with which ranks on `cores` cores run in proportion to `speeds`.

    A rank of factor f is busy for 1 / f of the time. Where the ranks outnumber the cores, all are slowed by one `scale` more,
    so that together they need no more than `FULLEST` of the cores.

    Args:
        speeds: relative, one for each rank.
        cores: of this machine; None asks the system.

    Raises:
        ClusterError: speeds that are not finite numbers > 0.
        InputError: less than one core, or speeds that differ by a factor of more than 10,000.
    """
    check_speeds(speeds)
    available = len(os.sched_getaffinity(0)) if cores is None else cores
    if available < 1:
        raise InputError(f"cores must be at least 1, not {available}")
    fastest = max(speeds)
    if fastest > MOST_TIMES_SLOWER * min(speeds):
        raise InputError(
            f"the speeds to emulate differ by a factor of {fastest / min(speeds):.3g}; a rank cannot be slowed to less than a "
            f"{MOST_TIMES_SLOWER:,}th of the fastest, or an iteration would last for hours"
        )
    busy_cores = math.fsum(speed / fastest for speed in speeds)
    # A rank for each core never waits for one.
    scale = 1.0 if len(speeds) <= available else max(1.0, busy_cores / (FULLEST * available))
    return Emulation(factors=tuple(scale * fastest / speed for speed in speeds), scale=scale)
