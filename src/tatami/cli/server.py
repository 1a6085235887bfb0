"""`tatami server`: train on parameter servers that survive the death of machines, and report the cost of each death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tatami.cli.options import epilog, optional, takes
from tatami.cli.script import read_script
from tatami.cli.server_job import ServerOutputs, ServerResumeJob, ServerTrainJob
from tatami.cli.terminal import show, show_json
from tatami.clock import Clock, SystemClock
from tatami.errors import InputError
from tatami.progress import Progress
from tatami.report import blank, check_path, save
from tatami.report.bar import progress_for
from tatami.report.tables import table_of
from tatami.units import format_duration

if TYPE_CHECKING:
    from torch import nn

    from tatami.server import RunContext, RunControl, RunReport, RunSettings

EPILOG = epilog(
    "tatami server train script.py --workers 4 --servers 2 --rounds 200",
    "tatami server train script.py --recovery checkpoint --every daly --directory run1",
    "tatami server resume run1",
    "tatami server report run.json --plot timeline.png",
)

_NAMES = ("model_fn", "loss_fn", "dataset")
server = typer.Typer(
    no_args_is_help=True, help="Train on parameter servers that survive dying machines.", epilog=EPILOG, rich_markup_mode="rich"
)


@server.command()
@takes(ServerTrainJob)
def train(job: ServerTrainJob) -> None:
    """Train the model of a script that defines model_fn(), loss_fn(output, target) and dataset, a pair of tensors."""
    from tatami.server.training import train as run

    _refuse(job)
    task = read_script(job.script, names=_NAMES)
    settings = job.settings()
    with _context(job, settings) as context:
        model, outcome = run(**task, settings=settings, directory=job.directory, context=context)
    _keep(model, job)
    _tell(outcome, as_json=job.as_json)


@server.command()
@takes(ServerResumeJob)
def resume(job: ServerResumeJob) -> None:
    """Resume a run whose process died or was stopped, from its last complete checkpoint."""
    from tatami.server import RunSettings
    from tatami.server.training import resume as resume_run

    _refuse(job)
    settings = RunSettings.read(job.directory)
    if job.script is None and settings.script is None:
        raise InputError(f"the run in {job.directory} was not started by the command line; name its script with --script")
    task = read_script(job.script or Path(str(settings.script)), names=_NAMES)
    if job.rounds is not None:
        settings = replace(settings, rounds=job.rounds)
    with _context(job, settings) as context:
        model, outcome = resume_run(job.directory, **task, settings=settings, context=context)
    _keep(model, job)
    _tell(outcome, as_json=job.as_json)


@server.command(name="report")
def show_report(
    run: Annotated[Path, typer.Argument(metavar="RUN.JSON", help="Report written by `tatami server train`.")],
    *,
    plot: Annotated[Path | None, optional(help="Draw the timeline (.png, .pdf or .svg).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show each failure of a run: when it was noticed, the process, how long it had been silent, and the seconds lost."""
    from tatami.report.ray_runs import draw_timeline
    from tatami.server import RunReport

    if plot is not None:
        check_path(plot, force=force)
    report = RunReport.load(run)
    if plot is not None:
        figure, ax = blank()
        draw_timeline(ax, report)
        save(figure, plot, force=force)
    _tell(report, as_json=as_json)


def _refuse(job: ServerOutputs) -> None:
    from tatami.outputs import check_output

    for path in (job.report, job.output, job.log):
        if path is not None:
            check_output(path, force=job.force)


@contextmanager
def _context(job: ServerOutputs, settings: RunSettings) -> Iterator[RunContext]:
    """Give the context of the run; inside the block its progress is shown and its records are written."""
    from tatami.records import Records
    from tatami.server import RunContext

    with (
        Records(job.log, tensorboard=job.tensorboard, force=job.force, settings=settings.record()) as records,
        shown_rounds(progress_for(), clock=SystemClock()) as on_round,
    ):
        yield RunContext(address=job.address, report=job.report, records=records, on_round=on_round)


def _keep(model: nn.Module, job: ServerOutputs) -> None:
    from tatami.checkpoints.tensors import write_tensors

    if job.output is not None:
        write_tensors(job.output, model.state_dict(), force=job.force)


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
    rows = [
        {
            "noticed at": f"{failure.at_s:.2f} s",
            "who": failure.who,
            "how": failure.how,
            "round": str(failure.round),
            "silent for": f"{failure.silent_s:.2f} s",
            "lost": "-" if failure.lost_s is None else f"{failure.lost_s:.2f} s",
        }
        for failure in report.failures
    ]
    show(table_of(f"{len(report.failures)} failures", rows, texts=("who", "how")))


_SHOWN_S = 0.25


@contextmanager
def shown_rounds(progress: Progress, *, clock: Clock) -> Iterator[Callable[[RunControl], None]]:
    """Give what `RunContext.on_round` calls: the status of the run goes to `progress`, at most four times a second."""
    last: RunControl | None = None
    done, shown_s = 0, clock.now_s()

    def show(run: RunControl) -> None:
        nonlocal done, shown_s
        status, shown_s = run.status(), clock.now_s()
        fields = {name: str(getattr(status, name)) for name in ("workers", "spares", "servers", "deaths")}
        loss = "-" if status.loss is None else f"{status.loss:.4g}"
        progress.advance(status.round - done, fields={"loss": loss, **fields, "seconds lost": f"{status.lost_s:.1f}"})
        done = status.round

    def on_round(run: RunControl) -> None:
        nonlocal last
        if last is None:
            progress.start("training", total=run.coordinator.settings.rounds, unit="rounds")
        last = run
        if clock.now_s() - shown_s >= _SHOWN_S:
            show(run)

    try:
        yield on_round
    finally:
        if last is not None:
            show(last)
            progress.finish()
