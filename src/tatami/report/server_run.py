"""What a run was: its rounds, its failures, and what each of them cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tatami.errors import InputError
from tatami.inputs import read_text
from tatami.outputs import write_text


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One process that failed.

    Attributes:
        at_s: when it was noticed, since the start of the first round.
        who: "worker 2", "server 0" or "spare 5".
        process: its number; that of the server for a server.
        how: "died", or "hung" where it was declared dead for its silence.
        silent_s: since its last sign of life: it had failed for no longer than that.
        round: commits that were applied by then.
        lost_s: by how much the round was longer than the median of rounds without failures; None where it never ended.
    """

    at_s: float
    who: str
    process: int
    how: str
    silent_s: float
    round: int
    lost_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run stands.

    Attributes:
        round: rounds done by the slowest worker.
        rounds: of the whole run.
        commits_per_s: over the last twenty; in lockstep a commit is a round.
        workers: places that a process holds.
        spares: that stand by.
        servers: that hold all their shards.
        lost_s: to all failures so far.
        loss: of the last round; None before the first.
    """

    round: int
    rounds: int
    commits_per_s: float
    workers: int
    spares: int
    servers: int
    deaths: int
    lost_s: float
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run from its first round to its end.

    Attributes:
        recovery: name of the policy.
        reached_s: when each version was first reached, from version `start` on; the first is 0.
        losses: the mean over the samples of each round that were applied.
        failures: in the order in which they were noticed.
        warnings: told during the run.
        workers: at the end.
        startup_s: from the call to the first round.
    """

    recovery: str
    start: int = 0
    reached_s: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    failures: tuple[Failure, ...] = ()
    warnings: tuple[str, ...] = ()
    workers: int = 0
    startup_s: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return self.start + max(0, len(self.reached_s) - 1)

    @property
    def seconds(self) -> float:
        return self.reached_s[-1] if self.reached_s else 0.0

    @property
    def round_s(self) -> tuple[float, ...]:
        """Seconds of each round, with what was done again in it."""
        return tuple(after - before for before, after in zip(self.reached_s, self.reached_s[1:], strict=False))

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write it as JSON. Raises as `tatami.outputs.write_text`."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n", force=force)

    @classmethod
    def load(cls, path: Path | str) -> RunReport:
        """Read what `save` wrote.

        Raises:
            InputError: no such file, or not a report.
        """
        try:
            values = json.loads(read_text(path, what="the report"))
            failures = tuple(Failure(**failure) for failure in values.pop("failures"))
            for name in ("reached_s", "losses", "warnings"):
                values[name] = tuple(values[name])
            return cls(failures=failures, **values)
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} is not a report of a parameter-server run: {error}") from error


def report_of(records: Iterable[Mapping[str, Any]], *, recovery: str, start: int) -> RunReport:
    """The report that follows from the records of a run: "begun", and each "round", "failure" and "warning" as it happened."""
    reached_s: list[float] = []
    losses, failures, warnings = [], [], []
    known: dict[str, Any] = {}
    for record in records:
        match record["event"]:
            case "begun":
                reached_s.append(0.0)
                known = {"workers": record["workers"], "startup_s": record["startup_s"]}
            case "round":
                reached_s.append(record["at_s"])
                losses.append(record["loss"])
            case "failure":
                names = ("who", "process", "how", "at_s", "silent_s")
                failures.append(Failure(round=record["iteration"], **{name: record[name] for name in names}))
            case "warning":
                warnings.append(record["message"])
    return with_costs(
        RunReport(
            recovery=recovery,
            start=start,
            reached_s=tuple(reached_s),
            losses=tuple(losses),
            failures=tuple(failures),
            warnings=tuple(warnings),
            **known,
        )
    )


def with_costs(report: RunReport) -> RunReport:
    """The report with the seconds that each failure cost; failures of one round share them."""
    spans = report.round_s
    disturbed = {failure.round - report.start for failure in report.failures}
    # The first round is longer than the others: torch and Ray do everything for the first time in it.
    calm = [span for number, span in enumerate(spans) if number not in disturbed and number > 0]
    if not calm:
        return report
    usual = statistics.median(calm)
    priced = []
    for failure in report.failures:
        number = failure.round - report.start
        together = sum(other.round == failure.round for other in report.failures)
        lost = (spans[number] - usual) / together if number < len(spans) else None
        priced.append(replace(failure, lost_s=lost))
    return replace(report, failures=tuple(priced))
