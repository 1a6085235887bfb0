"""`tatami run`: a script on several ranks."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tatami.cli.numbers import MOST_RANKS
from tatami.cli.terminal import show_json

EPILOG = """
[bold]Examples[/]

tatami run -n 4 train.py --epochs 20

tatami run -n 4 -m package.module

tatami run -n 8 --hosts node1:4,node2:4 train.py

In the script, [bold]comm = tatami.init()[/] finds the ranks.
"""


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT.PY [ARGS]...", help="What every rank runs.")],
    *,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, max=MOST_RANKS, help="How many ranks.")] = 2,
    hosts: Annotated[
        str | None, typer.Option(help="Machines to start on, as node1:4,node2:4; this one if left out.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="After the script's own output, one line of JSON: exit code and seconds.")
    ] = False,
) -> None:
    """Start a script on several ranks, through the launcher that came with MPI.

    A rank that fails ends them all, and the last line says which one it was.
    """
    from tatami.comm import launch

    start_s = time.perf_counter()
    code = launch.run(command, ranks=ranks, hosts=None if hosts is None else hosts.split(","))
    if as_json:
        show_json({"command": command, "ranks": ranks, "exit_code": code, "seconds": time.perf_counter() - start_s})
    raise typer.Exit(code)
