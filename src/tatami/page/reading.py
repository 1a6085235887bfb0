"""What a run left behind, read back: the JSON lines of `tatami.records`, or the JSON report of an elastic run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tatami.errors import InputError, shortened
from tatami.inputs import check_input, read_text


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The records of one run.

    Attributes:
        records: in the order in which they were written; each has its `event`.
        cut_off: whether the last line ends in the middle, as where a process was killed while it wrote.
    """

    records: tuple[Mapping[str, Any], ...]
    cut_off: bool = False

    def of(self, *events: str) -> list[Mapping[str, Any]]:
        """The records of these events, in their order."""
        return [record for record in self.records if record["event"] in events]


def read_run(path: Path | str) -> RecordedRun:
    """Read the records of a run.

    Args:
        path: the JSON lines of `Trainer(records=...)`, `tatami train --log` or `tatami server train --log`; or the report of
            `tatami run --elastic --report`.

    Raises:
        InputError: there is no such file, or it is something else; names the line.
    """
    text = read_text(path, what="the records", largest_bytes=None)
    elastic = _elastic(text)
    if elastic is not None:
        return RecordedRun(records=elastic)
    lines = text.split("\n")
    ends_whole = lines[-1] == ""
    records: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines[:-1] if ends_whole else lines, 1):
        try:
            records.append(_record(line, where=f"line {number} of {path}"))
        except _NotJsonError:
            if number == len(lines) and records:
                return RecordedRun(records=tuple(records), cut_off=True)
            raise
    if not records:
        raise InputError(f"{path} is empty: nothing was recorded")
    return RecordedRun(records=tuple(records))


def joined(runs: Sequence[RecordedRun]) -> RecordedRun:
    """One run that several files tell of: the log of an elastic run's Trainer, and the report of its repairs.

    Args:
        runs: what was read; the tilings are those of the first that has any.

    Raises:
        InputError: two of them tell of losses, so they are of two runs.
    """
    if sum(bool(run.of("train", "round")) for run in runs) > 1:
        raise InputError("these are logs of two runs, and a page is of one: give one log, and the report of its repairs")
    first = next((run for run in runs if run.of("tiling")), None)
    records = [record for run in runs for record in run.records if run is first or record["event"] != "tiling"]
    records.sort(key=lambda record: record.get("iteration", -1))
    return RecordedRun(records=tuple(records), cut_off=any(run.cut_off for run in runs))


class GrowingLog:
    """The JSON lines of a run that is still being written: each call reads what has come since the last.

    Args:
        path: of the log; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = self._num_lines = 0
        self._records: list[Mapping[str, Any]] = []

    def read(self) -> RecordedRun | None:
        """All records so far; None where nothing has come. A line that does not end yet is left for the next time.

        Raises:
            InputError: it is something else; names the line.
        """
        if not self._path.exists():
            return None
        check_input(self._path, what="the records")
        if self._path.stat().st_size < self._read_bytes:  # a new run writes over it
            self._read_bytes, self._num_lines, self._records = 0, 0, []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        for line in whole.decode("utf-8", errors="replace").split("\n") if newline else ():
            self._num_lines += 1
            self._records.append(_record(line, where=f"line {self._num_lines} of {self._path}"))
        self._read_bytes += len(whole) + len(newline)
        return RecordedRun(records=tuple(self._records)) if self._records else None


class _NotJsonError(InputError):
    """A line that may have been cut off."""


def _record(line: str, *, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise _NotJsonError(f"{where} is not JSON: {shortened(line)!r}; give what --log wrote") from None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise InputError(f"{where} is not a record with an event: {shortened(line)!r}; give what --log wrote")
    return record


def _elastic(text: str) -> tuple[Mapping[str, Any], ...] | None:
    """The report of an elastic run as records; None where `text` is something else."""
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(report, dict) or not isinstance(report.get("changes"), list):
        return None
    records: list[dict[str, Any]] = []
    if report.get("first_tiling") is not None:
        records.append({"event": "tiling", "iteration": 0, "why": "at the start", "tiling": report["first_tiling"]})
    for change in report["changes"]:
        facts = {name: value for name, value in change.items() if name != "tiling"}
        records.append({"event": "members", "iteration": change["step"], **facts})
        if change.get("tiling") is not None:
            why = change["reason"]
            records.append({"event": "tiling", "iteration": change["step"], "why": why, "tiling": change["tiling"]})
    return tuple(records)
