"""`tatami report`: make one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tatami.cli.options import epilog
from tatami.cli.terminal import show
from tatami.units import format_size

EPILOG = epilog(
    "tatami train -n 4 --retile --log run.jsonl",
    "tatami report run.jsonl -o run.html",
    "tatami run --elastic -n 4 --report repairs.json train.py",
    "tatami report run.jsonl repairs.json -o run.html",
)


def report(
    records: Annotated[
        list[Path],
        typer.Argument(metavar="RUN.jsonl...", help="Logs written by --log or Trainer(records=...), and reports of --elastic."),
    ],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Page to write (.html).")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Make one HTML page about a run: tilings, time by phase, loss, speeds, decisions, deaths, bytes by link.

    The page needs no network and no other file. Its charts can be read on a phone and used with the keyboard.
    """
    from tatami.report.page import check_page, joined, read_run, write_page

    check_page(output, force=force)
    run = joined([read_run(each) for each in records])
    write_page(run, output, title=f"Run {records[0].stem}", force=force)
    show(f"{output}: {format_size(output.stat().st_size, digits=3)}")
