"""`tatami run`: run a script on several ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from tatami.cli.options import DEVICE_HELP, MOST_RANKS, check_device, check_different, epilog, finite, optional, takes
from tatami.cli.terminal import show_json
from tatami.cluster.device_choice import DEVICE_VARIABLE
from tatami.errors import InputError
from tatami.outputs import check_output

EPILOG = epilog(
    "tatami run -n 4 train.py --epochs 20",
    "tatami run -n 4 -m package.module",
    "tatami run -n 8 --hosts node1:4,node2:4 train.py",
    "tatami run --elastic -n 8 train.py",
    "In the script, [bold]comm = tatami.init()[/] finds the ranks.",
)


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """The options of `tatami run`; their help texts describe the fields."""

    command: Annotated[list[str], typer.Argument(metavar="SCRIPT.PY [ARGS]...", help="Script that every rank runs.")]
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, max=MOST_RANKS, help="Number of ranks.")] = 2
    hosts: Annotated[str | None, optional(help="Machines to start on, such as node1:4,node2:4. Default: this one.")] = None
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda", help=DEVICE_HELP, show_default="the script's choice")
    ] = None
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Run on Ray; if a rank dies, the others continue. For a Trainer, or loops with tatami.steps."
        ),
    ] = False
    address: Annotated[str | None, optional(help="With --elastic: address of a Ray cluster. Default: start Ray here.")] = None
    copies: Annotated[int, typer.Option(min=1, max=2, help="With --elastic: number of ranks that hold each unit.")] = 2
    retile: Annotated[
        bool, typer.Option("--retile", help="With --elastic: adapt tiles to the ranks' speeds; a rank that is too slow waits.")
    ] = False
    report: Annotated[Path | None, optional(help="With --elastic: write losses and repairs to this file.")] = None
    plot: Annotated[Path | None, optional(help="With --elastic: draw the ranks over time, and the losses.")] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files of --report and --plot.")] = False
    heartbeat: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            callback=finite,
            show_default="10",
            help="With --elastic: seconds of silence after which a rank counts as dead.",
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON after the script's output: exit code and seconds.")
    ] = False


@takes(RunJob)
def run(job: RunJob) -> None:
    """Start a script on several ranks, with the launcher of the installed MPI.

    A rank that fails ends all ranks, and the last line names it. With --elastic the others continue without it.
    """
    if job.elastic and job.device not in (None, "cpu"):
        raise InputError("--device: an elastic run computes on CPUs; leave out --device or --elastic")
    if job.device is not None:
        check_device(job.device, hosts=job.hosts)
        os.environ[DEVICE_VARIABLE] = job.device
    if job.elastic:
        if job.hosts is not None:
            raise InputError("--hosts is for MPI; an elastic run is spread over the nodes of a Ray cluster: --address")
        _run_elastic(job)
        return
    only = {"--address": job.address, "--report": job.report, "--plot": job.plot, "--heartbeat": job.heartbeat}
    for name, value in only.items():
        if value is not None:
            raise InputError(f"{name} is for elastic runs: add --elastic, or leave it out")
    if job.force:
        raise InputError("--force is for the files of elastic runs: add --elastic, or leave it out")
    if job.retile:
        raise InputError("--retile is for elastic runs: add --elastic. Elsewhere the script asks for it: Trainer(retile=...)")
    from tatami.cli.ranks import start_ranks

    start_s = time.perf_counter()
    code = start_ranks(job.command, ranks=job.ranks, hosts=job.hosts)
    if job.as_json:
        seconds = time.perf_counter() - start_s
        show_json({"command": job.command, "ranks": job.ranks, "exit_code": code, "seconds": seconds})
    raise typer.Exit(code)


def _run_elastic(job: RunJob) -> None:
    check_different({"--report": job.report, "--plot": job.plot})
    if job.report is not None:
        check_output(job.report, force=job.force)
    from tatami.report import blank, check_path, draw_members, save

    if job.plot is not None:
        check_path(job.plot, force=job.force)
        figure, ax = blank()
    from tatami.comm.signals import ending_as_exception
    from tatami.elastic.launch import Script, run_elastic
    from tatami.elastic.settings import ElasticContext, ElasticSettings
    from tatami.report.elastic_run import ElasticReport

    def keep(report: ElasticReport) -> None:
        if job.report is not None:
            report.save(job.report, force=job.force)
        if job.plot is not None:
            draw_members(ax, report)
            save(figure, job.plot, force=job.force)

    settings = ElasticSettings(ranks=job.ranks, copies=job.copies, retile=job.retile)
    if job.heartbeat is not None:
        settings = replace(settings, heartbeat_s=job.heartbeat)
    context = ElasticContext(
        address=job.address,
        on_change=lambda change: print(f"tatami run: {change}", file=sys.stderr, flush=True),
        on_line=lambda name, text: print(f"{name}: {text}", flush=True),
        on_process=lambda name, pid, host: print(f"tatami run: {name} is process {pid} on {host}", file=sys.stderr, flush=True),
        on_end=keep,
    )
    try:
        with ending_as_exception():
            result = run_elastic(Script(job.command), settings=settings, context=context)
    except KeyboardInterrupt:
        print("tatami run: interrupted; all ranks are stopped", file=sys.stderr, flush=True)
        raise
    except SystemExit as error:
        if isinstance(error.code, int) and error.code - 128 in (signal.SIGTERM, signal.SIGHUP):
            how = signal.Signals(error.code - 128).name
            print(f"tatami run: ended by {how}; all ranks are stopped", file=sys.stderr, flush=True)
        raise
    if job.as_json:
        changes = [asdict(change) for change in result.report.changes]
        seconds = result.report.startup_s + result.report.total_s
        what = {"exit_code": 0, "seconds": seconds, "changes": changes, "not_joined": dict(result.report.not_joined)}
        show_json({"command": job.command, "ranks": job.ranks, **what})
