"""Output of the command line: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from tatami.report.tables import Table

RANK_TERMINAL_VARIABLE = "TATAMI_TERMINAL"
"""Set for ranks whose output ends on a terminal although their own streams are pipes: its width in characters."""

_UNKNOWN_WIDTH = 80
_outside: list[tuple[list[Any], Any]] = []
"""What `shown_warnings` has changed: filters, and the function that shows a warning."""


def show(*parts: str | Text | Table) -> None:
    """Print results for people, on stdout."""
    console = _console(sys.stdout)
    drawn = [_drawn(part) for part in parts if isinstance(part, Table)]
    wide = console.options.update(max_width=1000)
    fit = all(console.measure(each, options=wide).maximum <= console.width for each in drawn)  # in one style, or in the other
    for part in parts:
        if isinstance(part, Table):
            _show_table(console, part, drawn.pop(0) if fit else None)
        else:
            # Soft wrapping: a terminal breaks long lines at its edge, but copied or piped text stays on one line.
            console.print(part if isinstance(part, Text) else Text(part), soft_wrap=True)


def show_json(value: Any) -> None:
    """Print a result for programs: one line of JSON on stdout."""
    print(json.dumps(value), flush=True)


def tell(message: str, *, style: str = "") -> None:
    """Print a message about progress or events, on stderr."""
    console = _console(sys.stderr)
    with console.capture() as line:
        console.print(Text(message, style=style), soft_wrap=True)
    # Through sys.stderr itself, which a running progress bar has replaced so that lines come out above it.
    sys.stderr.write(line.get())
    sys.stderr.flush()


def width() -> int:
    """Return the width of the terminal in characters, at most 120, because wider character pictures are not better."""
    return min(120, _console(sys.stdout).width)


def is_terminal(stream: TextIO) -> bool:
    """Whether output to `stream` appears on a terminal, directly or through a launcher."""
    return stream.isatty() or RANK_TERMINAL_VARIABLE in os.environ


def environment_of_ranks() -> dict[str, str]:
    """Return environment variables that describe the terminal to ranks, which write to pipes."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return {}
    columns = str(_console(sys.stdout).width)
    # The last three belong to rich, for everything that uses it on the ranks, such as the progress bar.
    return {RANK_TERMINAL_VARIABLE: columns, "COLUMNS": columns, "FORCE_COLOR": "1", "TTY_INTERACTIVE": "1"}


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print each warning as one line on stderr, without the source line that raised it; not in copies of this process."""
    with warnings.catch_warnings():
        _outside.append((list(warnings.filters), warnings.showwarning))
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        try:
            yield
        finally:
            _outside.pop()


def _warn_as_outside() -> None:
    """Warnings of a program that a copy of this process runs are shown as Python shows them."""
    if _outside:
        filters, warnings.showwarning = _outside[0]
        warnings.resetwarnings()
        warnings.filters.extend(filters)  # type: ignore[attr-defined]
        _outside.clear()


os.register_at_fork(after_in_child=_warn_as_outside)


def _show_warning(
    message: Warning | str,
    category: type[Warning],  # noqa: ARG001 - the signature of warnings.showwarning
    filename: str,  # noqa: ARG001
    lineno: int,  # noqa: ARG001
    file: TextIO | None = None,  # noqa: ARG001
    line: str | None = None,  # noqa: ARG001
) -> None:
    tell(f"warning: {message}", style="yellow")


def _drawn(table: Table) -> RichTable:
    rich_table = table.to_rich()
    rich_table.show_edge = False
    return rich_table


def _show_table(console: Console, table: Table, drawn: RichTable | None) -> None:
    """Print a table as `drawn`, or else as plain text, because a truncated table cannot be read."""
    if drawn is not None:
        drawn.title = None  # which rich would wrap to the width of the table
        console.print(Text(table.title, style="bold"), soft_wrap=True)
        console.print(drawn)
        return
    text = table.to_text()
    if max(map(len, text.splitlines())) > console.width:
        text = table.to_text(gap=1)
    console.print(Text(text), soft_wrap=True)


def _console(stream: TextIO) -> Console:
    columns: Mapping[str, str] = os.environ
    given = columns.get(RANK_TERMINAL_VARIABLE)
    if given is not None and given.isdecimal():
        return Console(file=stream, force_terminal=True, width=int(given), highlight=False)
    console = Console(file=stream, highlight=False)
    if not console.width:  # COLUMNS=0, with which rich prints nothing: the width is not known
        console.width = _UNKNOWN_WIDTH
    return console
