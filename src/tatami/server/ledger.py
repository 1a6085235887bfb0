"""The record of a run: what was applied when, what failed, and every warning; written down as it happens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from tatami.errors import warn
from tatami.report.server_run import Failure, RunReport, report_of
from tatami.server.actions import Contribution
from tatami.server.worker_process import TaskOutcome


class Sink(Protocol):
    """Receives every entry, as `tatami.records.Records` does."""

    def write(self, event: str, *, iteration: int, values: dict[str, Any]) -> None: ...


class Ledger:
    """Keeps them.

    Args:
        start: the version that the run begins with.
        sinks: where every entry is written as well.
    """

    def __init__(self, *, recovery: str, start: int, sinks: Sequence[Sink] = ()) -> None:
        self.failures: list[Failure] = []
        self._recovery = recovery
        self._start = self._reached = start
        self._sinks = tuple(sinks)
        self._records: list[dict[str, Any]] = []
        self._outcomes: dict[tuple[int, int], TaskOutcome] = {}
        self._applied: dict[int, dict[str, Any]] = {}

    def began(self, *, workers: int, startup_s: float) -> None:
        """Note that the first round begins, at 0 s, after a start of `startup_s`."""
        self._records.append({"event": "begun", "workers": workers, "startup_s": startup_s})

    def worked(self, *, worker: int, round: int, outcome: TaskOutcome) -> None:
        """Note how a task ended."""
        self._outcomes[worker, round] = outcome

    def applies(self, version: int, contributions: Sequence[Contribution]) -> None:
        """Note which updates are being added up for this version."""
        parts = [self._outcomes[each.worker, each.round] for each in contributions]
        samples = sum(part.samples for part in parts)
        loss = sum(part.loss * part.samples for part in parts) / max(1, samples)
        self._applied[version] = {"loss": loss, "updates": len(parts), "samples": samples}

    def reached(self, version: int, *, at_s: float) -> bool:
        """Note that a version was reached; returns whether for the first time."""
        if version <= self._reached:
            return False
        self._reached = version
        self._write("round", iteration=version, values={"at_s": at_s, **self._applied[version]})
        return True

    def failed(self, failure: Failure) -> None:
        """Note that a process is gone."""
        self.failures.append(failure)
        names = ("who", "process", "how", "at_s", "silent_s")
        self._write("failure", iteration=failure.round, values={name: getattr(failure, name) for name in names})

    def warn(self, message: str, *, version: int) -> None:
        """Tell the user, and go on."""
        self._write("warning", iteration=version, values={"message": message})
        warn(message)

    def _write(self, event: str, *, iteration: int, values: dict[str, Any]) -> None:
        self._records.append({"event": event, "iteration": iteration, **values})
        for sink in self._sinks:
            sink.write(event, iteration=iteration, values=values)

    def last_not_finite(self) -> tuple[int, int]:
        """(worker, round) of the latest loss that is not a finite number; there is one."""
        return max((key for key, outcome in self._outcomes.items() if not math.isfinite(outcome.loss)), key=lambda key: key[1])

    def report(self, *, workers: int) -> RunReport:
        """The report of the run so far."""
        return replace(report_of(self._records, recovery=self._recovery, start=self._start), workers=workers)
