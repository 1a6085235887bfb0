"""`tatami simulate`: simulate runs on machines that you do not have."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tatami.cli.options import epilog, given, optional
from tatami.cli.simulate_options import chosen_platform
from tatami.cli.simulate_server import SERVER_EPILOG, simulate_server
from tatami.cli.terminal import show, show_json
from tatami.errors import InputError
from tatami.report import Table
from tatami.units import format_bandwidth, format_duration, format_speed, parse_duration

EPILOG = epilog(
    "tatami simulate server --preset paper-server-10k --recovery checkpoint,servers,ignore --runs 10 --rounds 200",
    "tatami simulate server --preset paper-server-10k --recovery servers --sweep mtbf=30d,1y,3y --json",
    "tatami simulate platform cluster.toml",
)

_MOST_ROWS = 500

simulate = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Simulate runs on machines that you do not have: how long a round takes, what a death costs.",
    epilog=EPILOG,
)
simulate.command(name="server", epilog=SERVER_EPILOG)(simulate_server)


@simulate.command()
def platform(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Cluster file, or file of groups.", show_default=False)
    ] = None,
    *,
    preset: Annotated[str | None, optional(help="Name of a platform to use instead of a file.")] = None,
    nodes: Annotated[int | None, optional(min=1, help="Number of nodes in the preset.")] = None,
    latency: Annotated[str | None, optional(help="Latency of one cable of the preset.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print a platform as it was read: machines, links and backbones."""
    if (preset is None) == (file is None):
        from tatami.sim.platforms import PRESETS

        raise InputError(f"which platform? Give a FILE, or --preset with one of {', '.join(sorted(PRESETS))}")
    latency_s = None if latency is None else given("--latency", parse_duration, latency)
    machines = chosen_platform(preset, file, nodes=nodes, latency_s=latency_s)
    if as_json:
        parts = [{**asdict(part), "what": part.what.strip()} for part in machines.parts]
        show_json({"name": machines.name, "fabric": machines.fabric.name, "hosts": len(machines.hosts), "parts": parts})
        return
    rows = [
        (
            part.what,
            f"{part.count:,}",
            "" if part.speed_flop_per_s is None else format_speed(part.speed_flop_per_s, digits=3),
            "" if part.bandwidth_bytes_per_s is None else format_bandwidth(part.bandwidth_bytes_per_s, digits=3),
            "" if part.latency_s is None else format_duration(part.latency_s, digits=3),
        )
        for part in machines.parts[:_MOST_ROWS]
    ]
    if (rest := len(machines.parts) - _MOST_ROWS) > 0:
        rows.append((f"... and {rest:,} more lines; --json has all", "", "", "", ""))
    headers = ("", "how many", "speed", "bandwidth", "latency")
    title = f"{machines.name}: {len(machines.hosts):,} hosts, transfers as {machines.fabric.name}"
    show(Table(title=title, headers=headers, rows=tuple(rows), numbers=frozenset({1, 2, 3, 4})))
    show(f"first host {machines.hosts[0]}, last host {machines.hosts[-1]}")
