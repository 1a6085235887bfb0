"""Deaths on order: a worker's process kills or stops itself at a given phase of a task."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tatami.server.phases import TaskPhase


class Death(Enum):
    """How a process fails: it ends, or it hangs."""

    KILL = signal.SIGKILL
    STOP = signal.SIGSTOP


@dataclass(frozen=True, kw_only=True)
class Crash:
    """One death, once: processes are never reused. Process w is worker w's first; spares follow."""

    process: int
    round: int
    phase: TaskPhase
    death: Death = Death.KILL


class Crashes:
    """Carries out `crashes`; hand it to `tatami.server.train(on_phase=...)`."""

    def __init__(self, crashes: Sequence[Crash]) -> None:
        self._crashes = tuple(crashes)

    def __call__(self, phase: TaskPhase, process: int, round_: int) -> None:
        for crash in self._crashes:
            if (crash.phase, crash.process, crash.round) == (phase, process, round_):
                os.kill(os.getpid(), crash.death.value)
