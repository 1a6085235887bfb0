"""`tatami run`: a script on several ranks."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tatami.cli.devices import DEVICE_HELP, ask_for_device
from tatami.cli.numbers import MOST_RANKS
from tatami.cli.terminal import show_json
from tatami.errors import InputError
from tatami.outputs import check_output

if TYPE_CHECKING:
    from tatami.elastic.settings import ElasticSettings

EPILOG = """
[bold]Examples[/]

tatami run -n 4 train.py --epochs 20

tatami run -n 4 -m package.module

tatami run -n 8 --hosts node1:4,node2:4 train.py

tatami run --elastic -n 8 train.py

In the script, [bold]comm = tatami.init()[/] finds the ranks.
"""


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT.PY [ARGS]...", help="What every rank runs.")],
    *,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, max=MOST_RANKS, help="How many ranks.")] = 2,
    hosts: Annotated[
        str | None, typer.Option(help="Machines to start on, as node1:4,node2:4; this one if left out.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda", help=DEVICE_HELP, show_default="the script's choice")
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Ranks on Ray: the others go on where one dies. The script loops by tatami.steps.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="With --elastic: of a Ray cluster; left out, Ray is started here.", show_default=False)
    ] = None,
    copies: Annotated[int, typer.Option(min=1, max=2, help="With --elastic: ranks that hold each unit, at least.")] = 2,
    retile: Annotated[
        bool, typer.Option("--retile", help="With --elastic: tiles follow the ranks' speeds; one that is too slow leaves.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="With --elastic: write what was lost and repaired to this file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --elastic: draw who was there when, and what was lost.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="After the script's own output, one line of JSON: exit code and seconds.")
    ] = False,
) -> None:
    """Start a script on several ranks, through the launcher that came with MPI.

    A rank that fails ends them all, and the last line says which one it was. With --elastic a rank that dies does not.
    """
    if elastic and device not in (None, "cpu"):
        raise InputError("--device: an elastic run computes on CPUs; leave --device or --elastic out")
    if device is not None:
        ask_for_device(device, hosts=hosts)
    if elastic:
        if hosts is not None:
            raise InputError("--hosts is for MPI; an elastic run is spread over the nodes of a Ray cluster: --address")
        from tatami.elastic.settings import ElasticSettings

        settings = ElasticSettings(ranks=ranks, copies=copies, retile=retile)
        _run_elastic(command, settings, address=address, report=report, plot=plot, as_json=as_json)
        return
    for name, value in (("--address", address), ("--report", report), ("--plot", plot)):
        if value is not None:
            raise InputError(f"{name} is for elastic runs: add --elastic, or leave it out")
    from tatami.comm import launch

    start_s = time.perf_counter()
    code = launch.run(command, ranks=ranks, hosts=None if hosts is None else hosts.split(","))
    if as_json:
        show_json({"command": command, "ranks": ranks, "exit_code": code, "seconds": time.perf_counter() - start_s})
    raise typer.Exit(code)


def _run_elastic(
    command: list[str],
    settings: ElasticSettings,
    *,
    address: str | None,
    report: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    if report is not None:
        check_output(report, force=False)
    from tatami.report import blank, check_path, draw_members, save

    if plot is not None:
        check_path(plot)
        figure, ax = blank()
    from tatami.elastic.launch import Script, run_elastic
    from tatami.elastic.settings import ElasticContext

    context = ElasticContext(
        address=address,
        on_change=lambda change: print(f"tatami run: {change}", file=sys.stderr, flush=True),
        on_line=lambda name, text: print(f"{name}: {text}", flush=True),
    )
    result = run_elastic(Script(command), settings=settings, context=context)
    if report is not None:
        result.report.save(report)
    if plot is not None:
        draw_members(ax, result.report)
        save(figure, plot)
    if as_json:
        changes = [asdict(change) for change in result.report.changes]
        seconds = result.report.startup_s + result.report.total_s
        show_json({"command": command, "ranks": settings.ranks, "exit_code": 0, "seconds": seconds, "changes": changes})
