"""`tatami server`: train on parameter servers that keep going when machines die, and tell what each death cost."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tatami.cli.numbers import finite
from tatami.cli.script import read_script
from tatami.cli.server_live import RunDisplay
from tatami.cli.terminal import show, show_json
from tatami.errors import InputError
from tatami.inputs import LARGEST_SEED
from tatami.report import blank, check_path, save
from tatami.report.tables import Table
from tatami.units import format_duration

if TYPE_CHECKING:
    from torch import nn

    from tatami.server import RunReport
    from tatami.server.consistency import AbstractConsistency
    from tatami.server.recovery import AbstractRecovery

EPILOG = """
[bold]Examples[/]

tatami server train script.py --workers 4 --servers 2 --rounds 200

tatami server train script.py --recovery checkpoint --every daly --directory run1

tatami server resume run1

tatami server report run.json --plot timeline.png
"""

_NAMES = ("model_fn", "loss_fn", "dataset")
server = typer.Typer(
    no_args_is_help=True, help="Parameter servers that keep training when machines die.", epilog=EPILOG, rich_markup_mode="rich"
)


class Recovery(StrEnum):
    """The names of the policies."""

    FROM_SERVERS = "from-servers"
    CHECKPOINT = "checkpoint"
    IGNORE = "ignore"


class Consistency(StrEnum):
    """The names of the rules."""

    BSP = "bsp"
    SSP = "ssp"
    ASP = "asp"
    BACKUP = "backup"


class Optimizer(StrEnum):
    """What runs on the servers."""

    SGD = "sgd"
    ADAM = "adam"


Address = Annotated[str | None, typer.Option(help="Of a Ray cluster; this machine if left out.", show_default=False)]
ReportFile = Annotated[
    Path | None, typer.Option(help="Keep what happened in this file, however the run ends.", show_default=False)
]
Log = Annotated[Path | None, typer.Option(help="A JSON line for each round and failure.", show_default=False)]
Board = Annotated[Path | None, typer.Option(metavar="DIR", help="Curves for TensorBoard.", show_default=False)]
Output = Annotated[Path | None, typer.Option(help="Keep the weights (safetensors).", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite these files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


@server.command()
def train(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.PY", help="Defines model_fn, loss_fn and dataset.")],
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Each on one batch, which the workers divide.")] = 100,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compute.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Processes that hold the parameters.")] = 2,
    spares: Annotated[int, typer.Option(min=0, help="Processes that stand by.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Servers that hold each parameter.")] = 1,
    min_workers: Annotated[int, typer.Option(min=1, help="With fewer the run stops.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a round.")] = 256,
    cluster: Annotated[
        Path | None, typer.Option(metavar="CLUSTER.TOML", help="Speeds of the workers, for unequal shares.", show_default=False)
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Runs on the servers.")] = Optimizer.SGD,
    lr: Annotated[
        float | None, typer.Option(callback=finite, help="Learning rate; 0.1 for SGD, 0.001 for Adam.", show_default=False)
    ] = None,
    momentum: Annotated[float, typer.Option(callback=finite, help="Of SGD.")] = 0.0,
    clip_norm: Annotated[float | None, typer.Option(callback=finite, help="The longest gradient.", show_default=False)] = None,
    recovery: Annotated[Recovery, typer.Option(help="What is done about a dead worker.")] = Recovery.FROM_SERVERS,
    every: Annotated[str, typer.Option(metavar="N|daly", help="Rounds between checkpoints, for --recovery checkpoint.")] = "1",
    consistency: Annotated[Consistency, typer.Option(help="How far workers may drift apart.")] = Consistency.BSP,
    staleness: Annotated[int, typer.Option(min=0, help="Rounds ahead of the slowest, for ssp.")] = 1,
    backups: Annotated[int, typer.Option(min=1, help="Updates of a round that are not waited for, for backup.")] = 1,
    heartbeat: Annotated[float, typer.Option(callback=finite, help="Seconds of silence after which a process is dead.")] = 2.0,
    directory: Annotated[Path | None, typer.Option(help="Where checkpoints go.", show_default=False)] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Rounds between checkpoints to resume from.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of the first parameters and of the batches.")] = 0,
    address: Address = None,
    report: ReportFile = None,
    log: Log = None,
    tensorboard: Board = None,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train what a script defines: model_fn(), loss_fn(output, target) and dataset, a pair of tensors."""
    from tatami.cluster import read_cluster
    from tatami.records import Records
    from tatami.server import SGD, Adam
    from tatami.server.training import train as run

    _refuse(report, output, force=force)
    task = read_script(script, names=_NAMES)
    rate = lr if lr is not None else 0.1 if optimizer is Optimizer.SGD else 0.001
    with Records(log, tensorboard=tensorboard, force=force) as records, RunDisplay() as display:
        model, outcome = run(
            task["model_fn"],
            task["loss_fn"],
            dataset=task["dataset"],
            rounds=rounds,
            workers=workers,
            servers=servers,
            spares=spares,
            replicas=replicas,
            min_workers=min_workers,
            batch_size=batch_size,
            optimizer=SGD(lr=rate, momentum=momentum) if optimizer is Optimizer.SGD else Adam(lr=rate),
            clip_norm=clip_norm,
            recovery=_recovery(recovery, every),
            consistency=_consistency(consistency, staleness=staleness, backups=backups),
            speeds=() if cluster is None else read_cluster(cluster),
            heartbeat_s=heartbeat,
            directory=directory,
            save_every=save_every,
            seed=seed,
            address=address,
            report=report,
            records=records,
            on_round=display.on_round,
            script=str(script.resolve()),
        )
    _keep(model, output, force=force)
    _tell(outcome, as_json=as_json)


@server.command()
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="What `tatami server train --directory` was given.")],
    *,
    rounds: Annotated[int | None, typer.Option(min=1, help="Of the whole run; as it began if left out.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="Defines model_fn, loss_fn and dataset, if the script has moved.", show_default=False)
    ] = None,
    address: Address = None,
    report: ReportFile = None,
    log: Log = None,
    tensorboard: Board = None,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run whose process died or was stopped, from its last whole checkpoint."""
    from tatami.records import Records
    from tatami.server.run_settings import RunSettings
    from tatami.server.training import resume as go_on

    _refuse(report, output, force=force)
    settings = RunSettings.read(directory)
    if script is None and settings.script is None:
        raise InputError(f"the run in {directory} was not started by the command line; name its script with --script")
    task = read_script(script or Path(str(settings.script)), names=_NAMES)
    with Records(log, tensorboard=tensorboard, force=force) as records, RunDisplay() as display:
        model, outcome = go_on(
            directory,
            model_fn=task["model_fn"],
            loss_fn=task["loss_fn"],
            dataset=task["dataset"],
            rounds=rounds,
            address=address,
            report=report,
            records=records,
            on_round=display.on_round,
        )
    _keep(model, output, force=force)
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


def _refuse(*paths: Path | None, force: bool) -> None:
    from tatami.outputs import check_output

    for path in paths:
        if path is not None:
            check_output(path, force=force)


def _keep(model: nn.Module, output: Path | None, *, force: bool) -> None:
    from tatami.checkpoints.tensors import write_tensors

    if output is not None:
        write_tensors(output, model.state_dict(), force=force)


def _consistency(name: Consistency, *, staleness: int, backups: int) -> AbstractConsistency:
    from tatami.server import ASP, BSP, SSP, Backup

    match name:
        case Consistency.SSP:
            return SSP(staleness=staleness)
        case Consistency.ASP:
            return ASP()
        case Consistency.BACKUP:
            return Backup(workers=backups)
        case Consistency.BSP:
            return BSP()


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
        show("no process failed")
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
