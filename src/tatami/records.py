"""What a run leaves behind: one JSON line for each thing that happened, and TensorBoard where it is wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from tatami.errors import MissingExtraError
from tatami.outputs import check_folder, check_output

_MOST_CURVES = 64
"""Of one mapping, such as the speeds of the ranks, in TensorBoard."""


class Records:
    """Writes records as JSON lines, and their numbers to TensorBoard. Only rank 0 is given one with files.

    Args:
        path: the JSON lines; None writes none.
        tensorboard: a directory for TensorBoard's event files; None writes none.
        force: overwrite an existing `path`.
        settings: of the run, for the first line of `path`.

    Raises:
        OutputExistsError: `path` exists and `force` is not given.
        InputError: `path` or `tensorboard` is something else, or cannot be written.
        MissingExtraError: TensorBoard is wanted and not installed.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        tensorboard: Path | str | None = None,
        force: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        path = None if path is None else Path(path)
        if path is not None:
            check_output(path, force=force)
        if tensorboard is not None:
            check_folder(tensorboard)
        self._file: TextIO | None = None
        self._board: Any = None
        self.kept: list[dict[str, Any]] | None = None
        """What was written since it was made a list: the records of a report."""
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingExtraError("tensorboard", extra="tensorboard") from error
            self._board = SummaryWriter(str(tensorboard))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Line by line, so that what happened before a crash is there after it.
            self._file = path.open("w", encoding="utf-8", buffering=1)
            if settings is not None:
                self._file.write(json.dumps({"event": "settings", **settings}) + "\n")

    @property
    def wanted(self) -> bool:
        """Whether anything becomes of what is written."""
        return self._file is not None or self._board is not None or self.kept is not None

    def write(self, event: str, *, iteration: int, values: dict[str, Any]) -> None:
        """Record that `event` happened after `iteration`; numbers among `values`, and in their mappings, become curves."""
        if self.kept is not None:
            self.kept.append({"event": event, "iteration": iteration, **values})
        if self._file is not None:
            self._file.write(json.dumps({"event": event, "iteration": iteration, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{event}/{name}", value, iteration)
                elif isinstance(value, Mapping) and len(value) <= _MOST_CURVES:
                    for key, each in value.items():
                        if isinstance(each, (int, float)):
                            self._board.add_scalar(f"{event}/{name}/{key}", each, iteration)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
