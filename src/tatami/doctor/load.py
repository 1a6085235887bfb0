"""Whether other programs use the machine: what its cores did meanwhile, without what was our own doing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tatami.clock import Clock, SystemClock

_MUCH = 0.2
_STAT = Path("/proc/stat")


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """What the cores of this machine did, on average over some time.

    Attributes:
        cores: that this process may use.
        others: cores that other programs kept busy.
        idle: cores that had nothing to do.
    """

    cores: int
    others: float
    idle: float

    @property
    def is_busy(self) -> bool:
        """Whether other programs took cores, and left too few idle: times taken meanwhile are not to be trusted."""
        return self.others > _MUCH * self.cores and self.idle < _MUCH * self.cores

    def sentence(self) -> str:
        """For people."""
        return f"other programs kept {self.others:.1f} cores of this machine busy, {self.idle:.1f} were idle"


class LoadWatch:
    """Watches the cores from when it is made; only Linux tells of them.

    Args:
        clock: for tests.
        read: the text of /proc/stat, for tests.
    """

    def __init__(self, *, clock: Clock | None = None, read: Callable[[], str] = _STAT.read_text) -> None:
        self._clock, self._read = clock or SystemClock(), read
        self._began_s, self._began = self._clock.now_s(), self._times_s()

    def load(self, *, own_s: float) -> MachineLoad | None:
        """What the cores did since then; None where it is not known.

        Args:
            own_s: CPU seconds that our own processes have used since then.
        """
        took_s, now = self._clock.now_s() - self._began_s, self._times_s()
        if self._began is None or now is None or took_s <= 0:
            return None
        busy_s, idle_s = now[0] - self._began[0], now[1] - self._began[1]
        cores = len(os.sched_getaffinity(0))
        return MachineLoad(cores=cores, others=max(0.0, busy_s - own_s) / took_s, idle=idle_s / took_s)

    def _times_s(self) -> tuple[float, float] | None:
        """Seconds that all cores together were busy, and idle, since the machine started."""
        try:
            words = self._read().split("\n", 1)[0].split()
            user, nice, system, idle, waiting, *rest = (int(word) for word in words[1:9])
        except (OSError, ValueError):
            return None
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        # The rest: interrupts, and what the hypervisor gave to other machines.
        return (user + nice + system + sum(rest)) / ticks_per_s, (idle + waiting) / ticks_per_s
