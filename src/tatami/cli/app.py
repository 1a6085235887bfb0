"""The `tatami` command: one thin subcommand for each function of the library."""

from __future__ import annotations

from typing import Annotated

import typer

import tatami
from tatami.cli import demo, doctor, examples, plan, probe, report, run, train, tune, watch
from tatami.cli.bench import bench
from tatami.cli.bench_allreduce import ALLREDUCE_EPILOG, bench_allreduce
from tatami.cli.group import Commands
from tatami.cli.lab import lab
from tatami.cli.server import server
from tatami.cli.simulate import simulate
from tatami.cli.simulate_allreduce import ALLREDUCE_EPILOG as SIMULATE_ALLREDUCE_EPILOG
from tatami.cli.simulate_allreduce import simulate_allreduce
from tatami.cli.simulate_tiling import TILING_EPILOG, simulate_tiling

app = typer.Typer(
    name="tatami",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one PyTorch network on unequal machines.",
    epilog="New here? [bold]tatami demo[/] trains one network on four unequal ranks in three ways, in about a minute; "
    "[bold]tatami doctor[/] checks what is installed and what is missing.",
)
app.command(epilog=probe.EPILOG)(probe.probe)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=run.EPILOG, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(run.run)
app.command(epilog=train.EPILOG)(train.train)
app.command(epilog=watch.EPILOG)(watch.watch)
app.command(epilog=report.EPILOG)(report.report)
bench.command(name="allreduce", epilog=ALLREDUCE_EPILOG)(bench_allreduce)
app.add_typer(bench, name="bench")
app.command(epilog=tune.EPILOG)(tune.tune)
app.add_typer(lab, name="lab")
app.add_typer(server, name="server")
simulate.command(name="allreduce", epilog=SIMULATE_ALLREDUCE_EPILOG)(simulate_allreduce)
simulate.command(name="tiling", epilog=TILING_EPILOG)(simulate_tiling)
app.add_typer(simulate, name="simulate")
app.command(epilog=demo.EPILOG)(demo.demo)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command(epilog=examples.EPILOG)(examples.examples)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tatami {tatami.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass  # The callback of `--version` does the work; this function only declares the option.


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    app(prog_name="tatami")
