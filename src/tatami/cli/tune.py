"""`tatami tune`: show the tables that `algorithm="auto"` uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tatami.cli.options import epilog
from tatami.cli.terminal import show, show_json, tell
from tatami.errors import InputError
from tatami.report import Table
from tatami.units import format_duration, format_size

EPILOG = epilog("tatami bench allreduce -n 4 --tune", "tatami tune --show")


def tune(
    *,
    show_tables: Annotated[bool, typer.Option("--show", help="Print the measured tables.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each table as a JSON line.")] = False,
) -> None:
    """Show the fastest all-reduce by size for each cluster, as measured by `tatami bench allreduce --tune`."""
    from tatami.comm.tuning import cache_directory

    if not (show_tables or as_json):
        raise InputError("tatami tune prints tables: add --show. To measure one: tatami bench allreduce -n 4 --tune")
    directory = cache_directory()
    paths = sorted(directory.glob("allreduce-*.json"))
    if not paths and not as_json:
        tell(f"no table in {directory}; measure one with: tatami bench allreduce -n 4 --tune")
    for path in paths:
        _show(path, as_json=as_json)


def _show(path: Path, *, as_json: bool) -> None:
    import tatami
    from tatami.collective import TuningTable

    try:
        table = TuningTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InputError) as error:
        tell(f"skipped {path}: {error}", style="yellow")
        return
    if as_json:
        show_json({"path": str(path), **json.loads(table.to_json())})
        return
    fingerprint = table.fingerprint
    hosts = ", ".join(
        f"{host}: {ranks} ranks, {cores} cores, {cpu}"
        for host, ranks, cores, cpu in zip(
            fingerprint.hosts, fingerprint.ranks_per_host, fingerprint.cores, fingerprint.cpus, strict=True
        )
    )
    names = list(dict.fromkeys(name for timing in table.timings for name in timing.seconds))
    show(
        Table(
            title=f"{hosts}; {fingerprint.library}",
            headers=("size", "auto uses", *names),
            rows=tuple(
                (
                    format_size(timing.size_bytes, digits=3),
                    str(table.choose(timing.size_bytes, among=names)),
                    *(format_duration(timing.seconds[name], digits=3) if name in timing.seconds else "" for name in names),
                )
                for timing in table.timings
            ),
            numbers=frozenset(range(2, len(names) + 2)),
        ),
        f"table: {path}",
    )
    if fingerprint.tatami != tatami.__version__:
        tell(f"ignored: measured by tatami {fingerprint.tatami}, but this is {tatami.__version__}", style="yellow")
