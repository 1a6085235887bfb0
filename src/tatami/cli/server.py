"""`tatami server`: train on parameter servers that survive the death of machines, and report the cost of each death."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tatami.cli.options import epilog, optional, takes
from tatami.cli.server_job import ServerOutputs, ServerResumeJob, ServerTrainJob
from tatami.cli.terminal import is_terminal, show, show_json
from tatami.clock import Clock, SystemClock
from tatami.errors import InputError, shortened
from tatami.report import blank, check_path, save
from tatami.report.tables import table_of
from tatami.units import format_duration

if TYPE_CHECKING:
    from torch import nn

    from tatami.report.server_run import RunStatus
    from tatami.server import RunContext, RunControl, RunReport, RunSettings

EPILOG = epilog(
    "tatami server train script.py --workers 4 --servers 2 --rounds 200",
    "tatami server train script.py --recovery checkpoint --every daly --directory run1",
    "tatami server resume run1",
    "tatami server report run.json --plot timeline.png",
)

_NAMES = ("model_fn", "loss_fn", "dataset")
server = typer.Typer(
    no_args_is_help=True, help="Parameter servers that keep training when machines die.", epilog=EPILOG, rich_markup_mode="rich"
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

    for path in (job.report, job.output):
        if path is not None:
            check_output(path, force=job.force)


@contextmanager
def _context(job: ServerOutputs, settings: RunSettings) -> Iterator[RunContext]:
    """Give the context of the run; inside the block its progress is shown and its records are written."""
    from tatami.records import Records
    from tatami.server import RunContext

    with (
        Records(job.log, tensorboard=job.tensorboard, force=job.force, settings=settings.record()) as records,
        RunDisplay() as display,
    ):
        yield RunContext(address=job.address, report=job.report, records=records, on_round=display.on_round)


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


_NAME = "tatami_server_script"


def read_script(path: Path, *, names: Sequence[str]) -> dict[str, Any]:
    """Run a script, not as `__main__`, and return the values it defines for `names`.

    Raises:
        InputError: the script does not exist, fails, ends the process, or does not define all of `names`.
    """
    if not path.is_file():
        raise InputError(f"there is no script {path}")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        # As __main__ its functions would be pickled by value, and a guarded main part would train a second time.
        defined = runpy.run_path(str(path), run_name=_NAME)
    except SyntaxError as error:
        where = path if error.filename in (None, str(path)) else error.filename
        raise InputError(f"{where}, line {error.lineno}: {error.msg}; this is not Python {_version()}") from error
    except ModuleNotFoundError as error:
        hint = f"install it for this Python ({sys.executable}), or start with the Python that has it"
        raise InputError(f"{_place(path, error)}: there is no module {error.name!r}; {hint}") from error
    except SystemExit as error:
        raise InputError(
            f"{_place(path, error)}: it ends the process (exit code {error.code}), and nothing would be trained; "
            f'it must define {_listed(names)}, and do anything else under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        said = shortened(str(error).strip().partition("\n")[0])
        raise InputError(f"{_place(path, error)}: {type(error).__name__}: {said}") from error
    finally:
        sys.path.pop(0)
    missing = [name for name in names if name not in defined]
    if missing:
        raise InputError(f"{path} must define {_listed(names)}; it lacks {', '.join(missing)}")
    return {name: defined[name] for name in names}


def _place(path: Path, error: BaseException) -> str:
    """Return the place of an error in the script: the last of its lines that were being run."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _version() -> str:
    return ".".join(str(number) for number in sys.version_info[:2])


_TABLE_S = 0.25
_LINE_S = 10.0


class RunDisplay:
    """Shows the status of a run; pass `on_round` to `tatami.server.train`, inside a `with` block."""

    def __init__(self, *, stream: TextIO | None = None, clock: Clock | None = None) -> None:
        self._run: RunControl | None = None
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock or SystemClock()
        self._live: Live | None = None
        self._every_s = _LINE_S
        self._shown_s = self._clock.now_s()

    def __enter__(self) -> RunDisplay:
        if is_terminal(self._stream):
            self._every_s = _TABLE_S
            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._show(self._run)
        if self._live is not None:
            self._live.stop()

    def on_round(self, run: RunControl) -> None:
        """Show the round, unless the previous one was shown too recently."""
        self._run = run
        now_s = self._clock.now_s()
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._show(run)

    def _show(self, run: RunControl) -> None:
        status = run.status()
        if self._live is not None:
            self._live.update(run_table(status), refresh=True)
        else:
            line = " · ".join(f"{name} {value}" for name, value in _cells(status).items())
            print(line, file=self._stream, flush=True)


def run_table(status: RunStatus) -> Table:
    """Make a table with one row: the status of the run."""
    table = Table(show_edge=False, pad_edge=False)
    for name in _cells(status):
        table.add_column(name, justify="right")
    cells: dict[str, Any] = _cells(status)
    table.add_row(*cells.values())
    return table


def _cells(status: RunStatus) -> dict[str, str]:
    return {
        "round": f"{status.round} of {status.rounds}",
        "commits/s": f"{status.commits_per_s:.3g}",
        "loss": "-" if status.loss is None else f"{status.loss:.4g}",
        "workers": str(status.workers),
        "spares": str(status.spares),
        "servers": str(status.servers),
        "deaths": str(status.deaths),
        "seconds lost": f"{status.lost_s:.1f}",
    }
