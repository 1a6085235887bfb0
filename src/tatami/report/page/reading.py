"""What a run left behind, read back: the JSON lines of `tatami.records`, or the JSON report of an elastic run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tatami.errors import InputError, shortened
from tatami.inputs import check_input, read_text
from tatami.report.page.record_shapes import lack_of

AT_THE_START = "at the start"
"""Why a call of `fit` has the tiling with which it begins."""


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

    @property
    def tilings(self) -> list[Mapping[str, Any]]:
        """The records of tilings, without those of a `fit` that begins with the tiling that there was."""
        found: list[Mapping[str, Any]] = []
        for record in self.of("tiling"):
            is_same = found and all(record.get(name) == found[-1].get(name) for name in ("tiling", "stages"))
            if not (is_same and record.get("why") == AT_THE_START):
                found.append(record)
        return found


def read_run(path: Path | str) -> RecordedRun:
    """Read the records of a run.

    Args:
        path: the JSON lines of `Trainer(records=...)`, `tatami train --log` or `tatami server train --log`; or the report of
            `tatami run --elastic --report`.

    Raises:
        InputError: there is no such file, or it is something else; names the line.
    """
    text = read_text(path, what="the records", largest_bytes=None)
    elastic = _elastic(text, path=path)
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
        runs: what was read, in any order; the tilings are those of the log, where it has any.

    Raises:
        InputError: two of them tell of losses, or their tilings are not of one run.
    """
    if sum(bool(run.of("train", "round")) for run in runs) > 1:
        raise InputError("these are logs of two runs, and a page is of one: give one log, and the report of its repairs")
    runs = sorted(runs, key=lambda run: not run.of("train", "round", "processes"))  # the log, and then the repairs
    floors = [_first_floor(run) for run in runs if run.of("tiling")]
    for floor in floors[1:]:
        if floor[0] != floors[0][0] or not floor[1] & floors[0][1]:
            told = " and ".join(f"{size[0]} samples by {size[1]} units on {', '.join(sorted(on))}" for size, on in floors)
            raise InputError(f"these are of different runs, with tilings of {told}: give a log and the repairs of its own run")
    first = next((run for run in runs if run.of("tiling")), None)
    records = [record for run in runs for record in run.records if run is first or record["event"] != "tiling"]
    records.sort(key=lambda record: record.get("iteration", -1))
    return RecordedRun(records=tuple(records), cut_off=any(run.cut_off for run in runs))


def _first_floor(run: RecordedRun) -> tuple[tuple[int, int], set[str]]:
    """Samples and units of the first tiling, and its processors."""
    tiling = run.of("tiling")[0]["tiling"]
    return (tiling["samples"], tiling["units"]), {tile["processor"] for tile in tiling["tiles"]}


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Phases and tiles with the names of today: logs of before are read. Ranks may be called as they like."""
    if "forward_s" in values and "vertical_s" in values:
        values |= {"tensor_parallel_s": values.pop("vertical_s"), "gradients_s": values.pop("horizontal_s")}
    if "units" in values and "column" in values:
        values["replica"] = values.pop("column")
    return values


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
        for line in whole.decode("utf-8-sig", errors="replace").split("\n") if newline else ():
            self._num_lines += 1
            self._records.append(_record(line, where=f"line {self._num_lines} of {self._path}"))
        self._read_bytes += len(whole) + len(newline)
        return RecordedRun(records=tuple(self._records)) if self._records else None


class _NotJsonError(InputError):
    """A line that may have been cut off."""


def _record(line: str, *, where: str) -> Mapping[str, Any]:
    try:
        record = _parsed(line)
    except (ValueError, RecursionError):
        raise _NotJsonError(f"{where} is not JSON: {shortened(line)!r}; give what --log wrote") from None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise InputError(f"{where} is not a record with an event: {shortened(line)!r}; give what --log wrote")
    return _checked(record, where=where)


def _parsed(text: str) -> Any:
    """
    Raises:
        ValueError, RecursionError: it is not JSON, or has halves of characters, which no terminal and no page can show.
    """
    value = json.loads(text, object_hook=_renamed)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _checked(record: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    if (lack := lack_of(record)) is not None:
        raise InputError(f"{where}, a record of {shortened(record['event'])!r}, {lack}; give what --log or --report wrote")
    return record


def _elastic(text: str, *, path: Path | str) -> tuple[Mapping[str, Any], ...] | None:
    """The report of an elastic run as records; None where `text` is something else.

    Raises:
        InputError: it is damaged.
    """
    try:
        report = _parsed(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(report, dict) or not isinstance(report.get("changes"), list):
        return None
    records: list[Mapping[str, Any]] = []
    if report.get("first_tiling") is not None:
        first = {"event": "tiling", "iteration": 0, "why": AT_THE_START, "tiling": report["first_tiling"]}
        records.append(_checked(first, where=f"'first_tiling' of {path}"))
    for number, change in enumerate(report["changes"]):
        where = f"'changes[{number}]' of {path}"
        if not isinstance(change, dict):
            raise InputError(f"{where} is {shortened(repr(change))}, and must be an object; give what --report wrote")
        facts = {name: value for name, value in change.items() if name not in ("tiling", "step")}
        at = {"iteration": change["step"]} if "step" in change else {}
        records.append(_checked({**facts, **at, "event": "members"}, where=where))
        if change.get("tiling") is not None:
            moved = {"event": "tiling", **at, "why": change["reason"], "tiling": change["tiling"]}
            records.append(_checked(moved, where=where))
    return tuple(records)
