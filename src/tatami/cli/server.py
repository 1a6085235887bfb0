"""`tatami server`: train on parameter servers that keep going when machines die, and tell what each death cost."""

from __future__ import annotations

import runpy
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.terminal import show, show_json
from tatami.errors import InputError
from tatami.report import blank, check_path, save
from tatami.report.bar import progress_for
from tatami.report.tables import Table
from tatami.units import format_duration

if TYPE_CHECKING:
    from tatami.server import RunReport, Runtime
    from tatami.server.recovery import AbstractRecovery

EPILOG = """
[bold]Examples[/]

tatami server train script.py --workers 4 --servers 2 --rounds 200

tatami server train script.py --recovery checkpoint --every daly --directory run1

tatami server report run.json --plot timeline.png
"""

server = typer.Typer(
    no_args_is_help=True, help="Parameter servers that keep training when machines die.", epilog=EPILOG, rich_markup_mode="rich"
)


class Recovery(StrEnum):
    """The names of the policies."""

    FROM_SERVERS = "from-servers"
    CHECKPOINT = "checkpoint"
    IGNORE = "ignore"


@server.command()
def train(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.PY", help="Defines model_fn, loss_fn and dataset.")],
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Each on one batch, which the workers divide.")] = 100,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compute.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Processes that hold the parameters.")] = 2,
    spares: Annotated[int, typer.Option(min=0, help="Processes that stand by.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Servers that hold each parameter.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a round.")] = 256,
    lr: Annotated[float, typer.Option(help="Learning rate of SGD.")] = 0.1,
    momentum: Annotated[float, typer.Option(help="Of SGD.")] = 0.0,
    recovery: Annotated[Recovery, typer.Option(help="What is done about a dead worker.")] = Recovery.FROM_SERVERS,
    every: Annotated[str, typer.Option(metavar="N|daly", help="Rounds between checkpoints, for --recovery checkpoint.")] = "1",
    heartbeat: Annotated[float, typer.Option(help="Seconds of silence after which a process is dead.")] = 2.0,
    directory: Annotated[Path | None, typer.Option(help="Where checkpoints go.", show_default=False)] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Rounds between checkpoints to resume from.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --directory.")] = False,
    seed: Annotated[int, typer.Option(help="Of the first parameters and of the batches.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Keep what happened in this file.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="Keep the weights (safetensors).", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite these files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Train what a script defines: model_fn(), loss_fn(output, target) and dataset, a pair of tensors."""
    from tatami.outputs import refuse_to_overwrite
    from tatami.server import SGD
    from tatami.server import train as run
    from tatami.train.checkpoint import write_tensors

    for path in (report, output):
        if path is not None:
            refuse_to_overwrite(path, force=force)
    task = _task(script)
    progress = progress_for()
    progress.start("training", total=rounds, unit="rounds")

    def on_round(runtime: Runtime) -> None:
        names = runtime.pids()
        fields = {
            "workers": str(sum("worker" in name for name in names)),
            "spares": str(sum("spare" in name for name in names)),
            "deaths": str(len(runtime.failures)),
        }
        progress.advance(1, fields=fields)

    try:
        model, outcome = run(
            task["model_fn"],
            task["loss_fn"],
            dataset=task["dataset"],
            rounds=rounds,
            workers=workers,
            servers=servers,
            spares=spares,
            replicas=replicas,
            batch_size=batch_size,
            optimizer=SGD(lr=lr, momentum=momentum),
            recovery=_recovery(recovery, every),
            heartbeat_s=heartbeat,
            directory=directory,
            save_every=save_every,
            resume=resume,
            seed=seed,
            on_round=on_round,
        )
    finally:
        progress.finish()
    if report is not None:
        outcome.save(report, force=force)
    if output is not None:
        write_tensors(output, model.state_dict(), force=force)
    _tell(outcome, as_json=as_json)


@server.command(name="report")
def show_report(
    run: Annotated[Path, typer.Argument(metavar="RUN.JSON", help="What `tatami server train --report` kept.")],
    *,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline (.png, .pdf or .svg).", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Tell of each failure of a run: when, whom, noticed after how long, seconds lost."""
    from tatami.server import RunReport
    from tatami.server.timeline import draw_timeline

    if plot is not None:
        check_path(plot, force=force)
    report = RunReport.load(run)
    if plot is not None:
        figure, ax = blank()
        draw_timeline(ax, report)
        save(figure, plot, force=force)
    _tell(report, as_json=as_json)


def _task(script: Path) -> dict[str, Any]:
    if not script.is_file():
        raise InputError(f"there is no script {script}")
    sys.path.insert(0, str(script.resolve().parent))
    try:
        # As __main__ its functions travel to the workers by value; a guarded main part would train a second time.
        names = runpy.run_path(str(script), run_name="tatami_server_script")
    finally:
        sys.path.pop(0)
    missing = [name for name in ("model_fn", "loss_fn", "dataset") if name not in names]
    if missing:
        raise InputError(f"{script} must define model_fn, loss_fn and dataset; it lacks {', '.join(missing)}")
    return names


def _recovery(name: Recovery, every: str) -> AbstractRecovery:
    from tatami.server import Checkpoint, FromServers, Ignore

    if name is Recovery.CHECKPOINT:
        if every != "daly" and not every.isdecimal():
            raise InputError(f"--every takes a number of rounds or 'daly', not {every!r}")
        return Checkpoint(every="daly" if every == "daly" else int(every))
    return FromServers() if name is Recovery.FROM_SERVERS else Ignore()


def _tell(report: RunReport, *, as_json: bool) -> None:
    if as_json:
        failures = [vars(failure) for failure in report.failures]
        loss = report.losses[-1] if report.losses else None
        show_json(
            {
                "recovery": report.recovery,
                "rounds": report.rounds,
                "seconds": report.seconds,
                "startup_s": report.startup_s,
                "loss": loss,
                "workers": report.workers,
                "failures": failures,
            }
        )
        return
    show(f"{report.rounds} rounds in {format_duration(report.seconds, digits=3)}, recovery {report.recovery}")
    if report.losses:
        show(f"loss of the last round: {report.losses[-1]:.5g}")
    if not report.failures:
        show("nobody failed")
        return
    rows = tuple(
        (
            f"{failure.at_s:.2f} s",
            failure.who,
            failure.how,
            str(failure.round),
            f"{failure.silent_s:.2f} s",
            "-" if failure.lost_s is None else f"{failure.lost_s:.2f} s",
        )
        for failure in report.failures
    )
    headers = ("noticed at", "who", "how", "round", "silent for", "lost")
    show(Table(title=f"{len(report.failures)} failures", headers=headers, rows=rows, numbers=frozenset({0, 3, 4, 5})))
