"""Where a run takes place, and what watches it: what may differ from one start of the same run to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tatami.clock import Clock, SystemClock
from tatami.records import Records
from tatami.server.run_settings import PhaseHook

if TYPE_CHECKING:
    from tatami.engine.crew import Pool
    from tatami.server.run_control import RunControl


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The surroundings of one call of `train` or `resume`; none of it changes what is computed.

    Attributes:
        address: of a Ray cluster; None runs on this machine.
        report: a file that is told what happened, however the run ends.
        records: written for every round and failure.
        on_round: called here after every commit; may add and remove workers.
        on_phase: called in the workers at each phase of a task: for tests of failures.
        pool: of processes from an earlier run on the same Ray; those that live are kept in it again.
        clock: of the run's process.
    """

    address: str | None = None
    report: Path | str | None = None
    records: Records | None = None
    on_round: Callable[[RunControl], None] | None = None
    on_phase: PhaseHook | None = None
    pool: Pool | None = None
    clock: Clock = field(default_factory=SystemClock)
