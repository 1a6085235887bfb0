"""What a run leaves behind: one JSON line for each thing that happened; and its numbers, where loggers are to have them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from tatami.errors import InputError, MissingExtraError, warn
from tatami.outputs import check_folder, check_output, free_name, write_text

_MOST_CURVES = 64
"""Most curves of one mapping, such as the speeds of the ranks, for loggers."""
Logger = Literal["wandb", "mlflow"] | Callable[[Mapping[str, float], int], object]
"""A package by its name, or a function of (numbers by name, iteration)."""


_goes_on = [False]


def let_records_go_on(goes_on: bool) -> None:
    """Whether files that are there are of the run that this process is in: it has joined it, or begins again in it."""
    _goes_on[0] = goes_on


class Records:
    """Writes records as JSON lines, and their numbers to TensorBoard. A Trainer writes to that of rank 0 only.

    Files are made with the first record, so that no rank is refused because another one has made them.

    Args:
        path: the JSON lines; None writes none.
        tensorboard: a directory for TensorBoard's event files; None writes none.
        loggers: what else gets the numbers, named as in TensorBoard ("train/loss"): "wandb" and "mlflow" log to the run that is
            active, or begin one; a function is called with (numbers by name, iteration).
        force: overwrite an existing `path`. Without it, `fit(resume=True)` goes on behind the records that are there, or keeps
            them under a free name where it finds no checkpoint; every other run refuses them.
        settings: of the run, for the first line of `path`.

    Raises:
        OutputExistsError: `path` exists, has no records of a run, and `force` is not given.
        InputError: `path` or `tensorboard` is something else, or cannot be written; a logger is unknown or not installed.
        MissingExtraError: TensorBoard is wanted and not installed.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        tensorboard: Path | str | None = None,
        loggers: Sequence[Logger] = (),
        force: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        path = None if path is None else Path(path)
        if path is not None:
            check_output(path, force=force or _goes_on[0] or _has_records(path))  # those may be of the run that is resumed
        if tensorboard is not None:
            check_folder(tensorboard)
        self._path, self._force = path, force
        self._file: TextIO | None = None
        self._settings = settings
        self._board: Any = None
        self._make_board: Callable[[], Any] | None = None
        check_loggers(loggers)
        self._loggers = [_function_of(each, settings or {}) for each in loggers]
        self.kept: list[dict[str, Any]] | None = None
        """What was written since it was made a list: the records of a report."""
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingExtraError("tensorboard", extra="tensorboard") from error
            self._make_board = partial(SummaryWriter, str(tensorboard))

    @property
    def wanted(self) -> bool:
        """Whether anything becomes of what is written."""
        return bool(self._path or self._make_board or self._loggers) or self.kept is not None

    @property
    def may_overwrite(self) -> bool:
        """Whether what is in the file may be lost."""
        return self._force or _goes_on[0]

    def refuse_existing(self) -> None:
        """Before a run that goes on from no other one is recorded.

        Raises:
            OutputExistsError: there are records already, and `force` was not given.
        """
        if self._path is not None and self._file is None:
            check_output(self._path, force=self.may_overwrite)

    def write(self, event: str, *, iteration: int, values: dict[str, Any]) -> None:
        """Record that `event` happened after `iteration`; numbers among `values`, and in their mappings, become curves."""
        if self.kept is not None:
            self.kept.append({"event": event, "iteration": iteration, **values})
        if self._path is not None:
            self._write_line(json.dumps({"event": event, "iteration": iteration, **values}) + "\n")
        if self._make_board is not None and self._board is None:
            self._board = self._make_board()
        if self._board is not None or self._loggers:
            numbers = dict(_numbers(event, values))
            for name, value in numbers.items() if self._board is not None else ():
                self._board.add_scalar(name, value, iteration)
            for log in self._loggers if numbers else ():
                log(numbers, iteration)

    def resume(self, *, iteration: int) -> None:
        """Go on in the file of the run that is resumed after `iteration`; later records are dropped, as they come again."""
        if self._path is None or self._file is not None or not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(self._path, "".join(line for line in lines if _is_before(line, iteration)), force=True)
        self._open("a")

    def set_aside(self) -> None:
        """Keep the records of an attempt that came to no checkpoint, unless they may be lost."""
        if self._path is not None and self._file is None and not self.may_overwrite and _has_records(self._path):
            kept = self._path.rename(free_name(self._path))
            print(f"tatami: the records that were in {self._path} are in {kept} now", flush=True)

    def _write_line(self, line: str) -> None:
        """Write a line; where the disk is full, that is no reason to lose what is trained."""
        file = self._file or self._open("w")
        try:
            file.write(line)
        except OSError as error:
            with suppress(OSError):
                file.close()
            warn(f"{self._path} cannot be written ({error.strerror or error}): the run goes on without further records in it")
            self._path = self._file = None

    def _open(self, mode: str) -> TextIO:
        assert self._path is not None
        if mode == "w":
            self.refuse_existing()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Line by line, so that what happened before a crash is there after it.
        file: TextIO = self._path.open(mode, encoding="utf-8", buffering=1)  # type: ignore[assignment]
        if self._settings is not None and mode == "w":
            file.write(json.dumps({"event": "settings", **self._settings}) + "\n")
        self._file = file
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_loggers(loggers: Sequence[Logger]) -> None:
    """
    Raises:
        InputError: one is unknown, or not installed.
    """
    for each in loggers:
        if isinstance(each, str) and each not in ("wandb", "mlflow"):
            raise InputError(f"there is no logger {each!r}: give 'wandb', 'mlflow', or a function of (numbers, iteration)")
        if isinstance(each, str) and each not in sys.modules and find_spec(each) is None:
            raise InputError(f"the logger {each!r} is not installed here: pip install {each}")


def _function_of(logger: Logger, settings: Mapping[str, Any]) -> Callable[[Mapping[str, float], int], object]:
    if not isinstance(logger, str):
        return logger

    def log(numbers: Mapping[str, float], iteration: int) -> None:
        package = import_module(logger)
        if logger == "wandb" and package.run is None:
            package.init(config=dict(settings))
        (package.log if logger == "wandb" else package.log_metrics)(dict(numbers), step=iteration)

    return log


def _numbers(event: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (int, float)):
            yield f"{event}/{name}", value
        elif isinstance(value, Mapping) and len(value) <= _MOST_CURVES:
            yield from ((f"{event}/{name}/{key}", each) for key, each in value.items() if isinstance(each, (int, float)))


def _has_records(path: Path) -> bool:
    """Whether a file begins as one that `Records` has written."""
    try:
        with path.open(encoding="utf-8") as file:
            return path.is_file() and "event" in json.loads(file.readline())
    except (OSError, ValueError, TypeError):
        return False


def _is_before(line: str, iteration: int) -> bool:
    """Whether a line is of what a run that goes on after `iteration` has behind it."""
    try:
        record = json.loads(line)
        return line.endswith("\n") and record["event"] not in ("end", "error") and record.get("iteration", 0) <= iteration
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
