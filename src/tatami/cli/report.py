"""`tatami report`: one HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tatami.cli.terminal import show
from tatami.units import format_size

EPILOG = """
[bold]Examples[/]

tatami train -n 4 --retile --log run.jsonl

tatami report run.jsonl -o run.html

tatami run --elastic -n 4 --report repairs.json train.py

tatami report repairs.json -o repairs.html
"""


def report(
    records: Annotated[Path, typer.Argument(metavar="RUN.jsonl", help="What --log or Trainer(records=...) wrote.")],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page (.html).")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Make one HTML page of a run: tilings, time by phase, loss, speeds, decisions, deaths, bytes by link.

    The page needs no network and no other file. Its charts can be read on a phone and used with the keyboard.
    """
    from tatami.page import check_page, read_run, write_page

    check_page(output, force=force)
    write_page(read_run(records), output, title=f"Run {records.stem}", force=force)
    show(f"{output}: {format_size(output.stat().st_size, digits=3)}")
