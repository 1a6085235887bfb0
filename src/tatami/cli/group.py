"""The group of commands: errors that Tatami raises on purpose become one message and an exit code."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any, Never

import typer
from rich.text import Text
from typer.core import TyperGroup

from tatami.cli.terminal import shown_warnings, tell, width
from tatami.errors import CommError, InputError, MissingExtraError, TatamiError, shortened

BAD_INPUT = 2
FAILED = 1
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
USAGE_ERROR: Any = typer.BadParameter.__base__
"""Base class of all errors of options; typer includes its own copy of click, which differs between versions."""
_LONGEST_LINE = 1000
_GRACE_S = 5.0
"""Rank 0 prints an error that all ranks raise; another rank prints it only if rank 0 has not ended the job after this time."""


class Commands(TyperGroup):
    """Commands with exit codes: 0: done; 1: the run failed; 2: the input was refused before anything was started or written."""

    def make_context(self, *given: Any, **named: Any) -> Any:
        if width() < 80:  # which would cut the columns of a help page
            _write_help_without_panels(self)
        return super().make_context(*given, **named)

    def invoke(self, ctx: Any) -> Any:
        with shown_warnings():
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                raise  # `tatami ... | head`: click ends quietly
            except USAGE_ERROR as error:
                found: list[Any] = getattr(error.__context__, "errors", list)()  # pydantic's, which do not show the value
                seen = f", not {found[0]['input']}" if found else ""
                error.message = shortened(error.message + seen, longest=_LONGEST_LINE)
                raise
            except (TatamiError, OSError, MemoryError) as error:
                code = BAD_INPUT if isinstance(error, InputError | MissingExtraError) else FAILED
                rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), None)
                if rank is not None:
                    _end_all_ranks(error, rank=rank, exit_code=code)
                tell(f"error: {_said(error)}", style="red")
                raise typer.Exit(code) from None


def _write_help_without_panels(command: Any) -> None:
    """Let a command, and all below it, write each option on a line of its own, and below it what it means."""

    def format_help(ctx: Any, formatter: Any) -> None:
        formatter.width = width() - 2
        formatter.write_dl = partial(formatter.write_dl, col_max=10)  # longer names have a line of their own
        type(command).format_help(command, ctx, formatter)

    command.format_help, command.rich_markup_mode = format_help, None
    command.help, command.epilog = (Text.from_markup(text or "").plain for text in (command.help, command.epilog))
    command.short_help = command.help.partition("\n\n")[0]  # in full: click ends its own with an ellipsis
    for each in getattr(command, "commands", {}).values():
        _write_help_without_panels(each)


def _said(error: BaseException) -> str:
    """Return the message alone: a full disk and similar errors are not faults of this program and need no traceback."""
    if isinstance(error, MemoryError) and not isinstance(error, TatamiError):
        return "there is not enough memory for this"
    return "\n".join(shortened(line, longest=_LONGEST_LINE) for line in str(error).split("\n"))


def _end_all_ranks(error: BaseException, *, rank: str, exit_code: int) -> Never:
    """Print the error once and end the job: if only this rank ended, the others would wait for it."""
    from tatami.comm.session import stop_all_ranks

    if rank != "0" and not isinstance(error, CommError):
        time.sleep(_GRACE_S)
    stop_all_ranks(f"error: {_said(error)}", exit_code=exit_code)
