"""`tatami bench server`: the parameter server against bare memory copies, and against independent loops."""

from __future__ import annotations

from typing import Annotated

import typer

from tatami.cli.terminal import show, show_json
from tatami.report.tables import Table
from tatami.units import format_duration

SERVER_EPILOG = """
[bold]Examples[/]

tatami bench server

tatami bench server --megabytes 20 --workers 2 --json
"""


def bench_server(
    *,
    megabytes: Annotated[int, typer.Option(min=1, metavar="MB", help="Of parameters that a round moves.")] = 100,
    workers: Annotated[int, typer.Option(min=1, help="Of the round that moves them.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Of the round that moves them.")] = 2,
    rounds: Annotated[int, typer.Option(min=3, metavar="N", help="The first two are not counted.")] = 12,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Of training, for the throughput.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each measurement.")] = False,
) -> None:
    """Time rounds that move parameters and compute nothing, and rounds of training with one worker on each of two cores."""
    from tatami.bench.server import MB, ServerBenchmark, bench_round, bench_throughput

    moved = bench_round(ServerBenchmark(size_bytes=megabytes * MB, workers=workers, servers=servers, rounds=rounds))
    if as_json:
        show_json(moved)
    trained = bench_throughput(steps=steps)
    if as_json:
        show_json(trained)
        return
    rows = (
        (
            f"a round of {megabytes} MB, {workers} workers, {servers} servers",
            format_duration(moved["round_median_s"], digits=3),
            f"bare copies: {format_duration(moved['bare_copies_s'], digits=3)}",
            f"{moved['round_over_bare_copies']:.2f} times as long",
        ),
        (
            f"a round of training, {trained['workers']} workers",
            format_duration(trained["bsp_round_s"], digits=3),
            f"a loop on its own: {format_duration(trained['loop_step_s'], digits=3)}",
            f"{trained['bsp_over_loops']:.2f} of its speed",
        ),
        ("start to first round", format_duration(moved["start_to_first_round_s"], digits=3), "", ""),
    )
    show(Table(title="the parameter server", headers=("what", "takes", "beside", ""), rows=rows, numbers=frozenset({1})))
