"""A small process beside a run that reports the run's end where the run's own process cannot.

Ray ends the process that uses it, by `_exit` and silently, where its raylet or its GCS is gone; the kernel ends it where
memory runs out. What happened until then was told to the witness, which writes the report, says what ended, and ends as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tatami.report.server_run import RunReport, report_of

_END_S = 10.0
_FAULT, _OVER = "fault", "over"


class Witness:
    """The process, as the run sees it; use it in a `with` block, which the run leaves in order to report its end itself.

    Args:
        recovery: name of the policy, for the report.
        start: the version that the run begins with.
        report: the file that is to be written.
        directory: of checkpoints.
    """

    def __init__(self, *, recovery: str, start: int, report: Path | str | None, directory: Path | None) -> None:
        self._waiting = b""
        path = os.pathsep.join(each for each in sys.path if each)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # what ends the run from a terminal must not end its witness
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        files = [None if each is None else os.path.abspath(each) for each in (report, directory)]
        self._tell({"pid": os.getpid(), "recovery": recovery, "start": start, "report": files[0], "directory": files[1]})

    @property
    def pid(self) -> int:
        return self._process.pid

    def began(self, *, workers: int, startup_s: float) -> None:
        """The first round begins."""
        self._tell({"event": "begun", "workers": workers, "startup_s": startup_s})

    def write(self, event: str, *, iteration: int, values: dict[str, Any]) -> None:
        """Note what `tatami.records.Records` is told as well."""
        self._tell({"event": event, "iteration": iteration, **values})

    def fault(self, what: str) -> None:
        """Why the run's process is about to be ended."""
        self._tell({"event": _FAULT, "what": what})

    def _tell(self, record: dict[str, Any]) -> None:
        """Never waits: what the pipe has no room for is sent with the next."""
        self._waiting += json.dumps(record).encode() + b"\n"
        with suppress(BlockingIOError, OSError):  # the second: the witness itself is gone, and the run goes on without it
            sent = os.write(self._pipe.fileno(), self._waiting)
            self._waiting = self._waiting[sent:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        os.set_blocking(self._pipe.fileno(), True)
        self._tell({"event": _OVER})
        with suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def account(records: Iterable[dict[str, Any]]) -> tuple[RunReport, str] | None:
    """What is to be said after these records, the last of which may be missing: the report, and why the run ended.

    None where the run reported its end itself.
    """
    first, *others = records
    told = {record["event"]: record for record in others}
    if _OVER in told:
        return None
    fault = (
        f"its process ({first['pid']}) ended without a word: it was killed, or Ray ended it, which does so where its own "
        "processes are gone"
    )
    report = report_of(others, recovery=first["recovery"], start=first["start"])
    return report, f"the run stopped after {report.rounds} rounds: {told.get(_FAULT, {'what': fault})['what']}."


def main() -> None:
    """Note what the run tells, and speak when it has ended without having said that it is over."""
    records = []
    for line in sys.stdin:
        with suppress(ValueError):  # the last, of a process that ended in the middle of it
            records.append(json.loads(line))
    if not records or (told := account(records)) is None:
        return
    report, message = told
    path, directory = records[0]["report"], records[0]["directory"]
    if path is not None:
        report.save(path, force=True)
    print(f"error: {message}{aftermath(report=path, directory=directory)}", file=sys.stderr, flush=True)


def aftermath(*, report: Path | str | None, directory: Path | str | None) -> str:
    """Sentences, each with a space before it, for the end of an error; "" where the run leaves nothing.

    Args:
        report: the file that says what happened.
        directory: of checkpoints.
    """
    from tatami.server import checkpoints  # brings numpy, which the witness needs at its end only

    said = "" if report is None else f" What happened is in {report}."
    if directory is not None and (saved := checkpoints.versions(Path(directory))):
        said += (
            f" The state of version {saved[-1]} is saved in {directory}: "
            f"`tatami server resume {directory}` or tatami.server.resume({str(directory)!r}, ...) goes on from there."
        )
    return said


if __name__ == "__main__":
    main()
