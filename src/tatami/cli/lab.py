"""`tatami lab`: emulate a cluster on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tatami.cli.group import FAILED
from tatami.cli.options import epilog, finite, optional
from tatami.cli.terminal import environment_of_ranks, show, show_json, tell
from tatami.cluster import read_cluster
from tatami.report.tables import Table, table_of
from tatami.report.words import percent
from tatami.units import format_bandwidth

if TYPE_CHECKING:
    from tatami.lab.check import Finding
    from tatami.lab.events import LabEvent

RUN_EPILOG = epilog(
    "tatami lab run cluster.toml -- python train.py --epochs 20",
    "tatami lab run cluster.toml --at 20s kill h3 --at 10s speed h1 0.25 -- python train.py",
    "Events: TIME [bold]kill[/] HOST, TIME [bold]cut[/] HOST, TIME [bold]mend[/] HOST, TIME [bold]speed[/] HOST SPEED,\n"
    "TIME [bold]rate[/] HOST RATE.",
)
SHELL_EPILOG = epilog(
    "tatami lab shell h1                           (while `tatami lab run` is running)",
    "tatami lab shell h1 --cluster cluster.toml    (a new lab, until the shell ends)",
)

lab = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Emulate a cluster on this machine: hosts with their own speeds, links, names and failures (Linux, root).",
)

_CLUSTER = typer.Argument(metavar="CLUSTER.TOML", help="Hosts, their speeds, and the links between them.")
_CORES = optional(callback=finite, help="Number of cores of this machine to use, such as 1.5. Default: all.")

_BASE_MEMORY = optional(
    metavar="SIZE",
    help="Limit each host to its processors' memory plus this for each process, such as 400MiB. Default: no limit.",
)
_PACED = typer.Option(
    "--paced",
    help="Hosts compute at this machine's full speed, then wait until their own speed (in flop/s) is met: steadier times.",
)
_BALANCE = optional(callback=finite, help="Flop that a paced host computes in the time of moving a byte.", show_default="8")
_DILATE = optional(callback=finite, help="Factor by which a paced lab slows computing and links.")


class _WithEvents(TyperCommand):
    """Joins the words after `--at` into one, as many as its verb has, so that `--at 20s kill h3` needs no quotes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from tatami.lab.events import num_words

        end = args.index("--") if "--" in args else len(args)
        ours, command, joined = args[:end], args[end:], []
        while ours:
            joined.append(ours.pop(0))
            if joined[-1] == "--at" and ours and " " not in ours[0]:
                size = num_words(ours[1]) if len(ours) > 1 else 1
                joined.append(" ".join(ours[:size]))
                ours = ours[size:]
        return super().parse_args(ctx, joined + command)


@lab.command(cls=_WithEvents, epilog=RUN_EPILOG, context_settings={"allow_interspersed_args": True})
def run(
    cluster: Annotated[Path, _CLUSTER],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Command that every rank runs.")],
    *,
    at: Annotated[
        list[str] | None, optional(metavar="EVENT", help="An event during the run, such as 20s kill h3; may be repeated.")
    ] = None,
    cores: Annotated[float | None, _CORES] = None,
    base_memory: Annotated[str | None, _BASE_MEMORY] = None,
    paced: Annotated[bool, _PACED] = False,
    dilate: Annotated[float, _DILATE] = 1.0,
    balance: Annotated[float | None, _BALANCE] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON after the command's output: exit code, scale, quotas.")
    ] = False,
) -> None:
    """Run a command on every processor of a cluster, as ranks of a real MPI job over TCP, and remove the lab afterwards."""
    from tatami.lab import Lab, parse_event

    events = [parse_event(text) for text in at or []]
    how = {} if balance is None else {"balance": balance}
    with Lab(read_cluster(cluster), cores=cores, base_memory=base_memory, paced=paced, dilation=dilate, **how) as machine:
        tell(machine.plan.describe())
        code = machine.run(
            command,
            events=events,
            environment=environment_of_ranks(),
            said=lambda event: tell(f"lab: {_describe(event)}", style="yellow"),
        )
        for told in machine.starved().values():
            tell(f"lab: {told}", style="yellow")
        if as_json:
            plan = machine.plan
            hosts: dict[str, object] = {"scale_cores": plan.scale, "quotas_cores": plan.quotas}
            if plan.paced:
                hosts = {"flop_per_s": list(plan.cluster.speeds.values()), "dilation": plan.dilation, "balance": plan.balance}
            show_json({"command": command, "exit_code": code, **hosts})
    raise typer.Exit(code)


@lab.command(epilog=SHELL_EPILOG)
def shell(
    host: Annotated[str, typer.Argument(metavar="HOST", help="The host to run the shell on.")],
    *,
    cluster: Annotated[Path | None, optional(metavar="CLUSTER.TOML", help="Build a lab for this shell.")] = None,
    name: Annotated[str | None, optional("--lab", help="Name of the lab, if several have such a host.")] = None,
    cores: Annotated[float | None, _CORES] = None,
) -> None:
    """Open a shell on a host of a lab, under the quota of the host's first processor."""
    from tatami.lab import Lab, running_lab
    from tatami.lab.launched_job import FIRST, spawn_on
    from tatami.lab.needs import require_lab

    require_lab()
    program = [os.environ.get("SHELL") or "/bin/sh"]
    if cluster is None:
        raise typer.Exit(_in_foreground(spawn_on(running_lab(host, name=name).host_file(host), FIRST, program)))
    with Lab(read_cluster(cluster), cores=cores) as machine:
        tell(machine.plan.describe())
        code = _in_foreground(machine.spawn(host, program))
    raise typer.Exit(code)


@lab.command()
def check(
    cluster: Annotated[Path, _CLUSTER],
    *,
    cores: Annotated[float | None, _CORES] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with a record for each speed and rate.")] = False,
) -> None:
    """Build a lab, measure the speed of every processor and the rate of every link, and compare with the cluster file.

    Exit code 1 if one of them is more than 10 % off.
    """
    from tatami.lab import Lab
    from tatami.lab.check import TOLERANCE, check_lab

    with Lab(read_cluster(cluster), cores=cores) as machine:
        tell(machine.plan.describe())
        findings = check_lab(machine, said=tell)
    if as_json:
        show_json([{**asdict(each), "error": each.error, "holds": each.holds} for each in findings])
    else:
        show(_table(findings))
    wrong = [finding for finding in findings if not finding.holds]
    if wrong:
        tell(
            f"{len(wrong)} of {len(findings)} are more than {percent(TOLERANCE)} off; is this machine running other programs? "
            "Use fewer of its cores (--cores), or slower links",
            style="yellow",
        )
        raise typer.Exit(FAILED)


@lab.command()
def clean() -> None:
    """Remove the remains of labs whose process was killed. Running labs are left alone."""
    from tatami.lab import known_labs, take_away
    from tatami.lab.needs import require_lab

    require_lab()
    labs = known_labs()
    for state in labs:
        if state.is_running:
            show(f"{state.name} is running (process {state.owner}); left alone")
        else:
            take_away(state)
            show(f"removed {state.name}: hosts {', '.join(state.hosts)}")
    if not labs:
        show("nothing to clean")


def _in_foreground(process: subprocess.Popen[bytes]) -> int:
    """Wait for a shell that has the terminal, and ignore Ctrl-C meanwhile, which is meant for the shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _describe(event: LabEvent) -> str:
    value = {"speed": f" {event.value:g}", "rate": f" {format_bandwidth(event.value, digits=3)}"}.get(event.verb, "")
    return f"{event.verb} {event.host}{value}"


def _table(findings: list[Finding]) -> Table:
    rows = []
    for finding in findings:
        asked, got = (_amount(finding.kind, value) for value in (finding.asked, finding.got))
        off, within = f"{100 * finding.error:+.1f} %", "yes" if finding.holds else "no"
        rows.append({"": finding.kind, "of": finding.name, "asked": asked, "got": got, "off by": off, "within 10 %": within})
    return table_of("The lab, measured", rows, texts=("", "of", "within 10 %"))


def _amount(kind: str, value: float) -> str:
    return f"{value:.3g}" if kind == "speed" else format_bandwidth(value, digits=3)
