"""`tatami bench server`: the parameter server against bare memory copies, and against independent loops."""

from __future__ import annotations

from typing import Annotated

import typer

from tatami.cli.options import epilog
from tatami.cli.terminal import show, show_json
from tatami.report.tables import Table
from tatami.units import format_duration

SERVER_EPILOG = epilog(
    "tatami bench server",
    "tatami bench server --megabytes 20 --workers 2 --json",
)


def bench_server(
    *,
    megabytes: Annotated[int, typer.Option(min=1, metavar="MB", help="Of parameters that a round moves.")] = 100,
    workers: Annotated[int, typer.Option(min=1, help="Of the round that moves them.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Of the round that moves them.")] = 2,
    rounds: Annotated[int, typer.Option(min=3, metavar="N", help="Of a block; the first two are not counted.")] = 12,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Of training in a block, for the throughput.")] = 10,
    blocks: Annotated[int, typer.Option(min=1, metavar="N", help="Of rounds, in turn with what they are compared to.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each measurement.")] = False,
) -> None:
    """Time rounds that move parameters and compute nothing, and rounds of training with one worker on each of two cores."""
    from tatami.bench.server import MB, ServerBenchmark, bench_round
    from tatami.bench.server_loops import bench_throughput

    size_bytes = megabytes * MB
    benchmark = ServerBenchmark(size_bytes=size_bytes, workers=workers, servers=servers, rounds=rounds, blocks=blocks)
    moved = bench_round(benchmark)
    if as_json:
        show_json(moved)
    rows = [
        (
            f"a round of {megabytes} MB, {workers} workers, {servers} servers",
            format_duration(moved["round_median_s"], digits=3),
            f"bare copies: {format_duration(moved['bare_copies_s'], digits=3)}",
            f"{moved['round_over_bare_copies']:.2f} times as long",
        ),
        ("start to first round", format_duration(moved["start_to_first_round_s"], digits=3), "", ""),
    ]
    for trained in bench_throughput(steps=steps, blocks=blocks):
        if as_json:
            show_json(trained)
        rows.append(
            (
                f"a round of training, {trained['workers']} workers of {trained['samples_per_worker']} samples",
                format_duration(trained["bsp_round_s"], digits=3),
                f"a loop on its own: {format_duration(trained['loop_step_s'], digits=3)}",
                f"{trained['bsp_over_loops']:.2f} of its speed",
            )
        )
    if not as_json:
        numbers = frozenset({1})
        show(Table(title="the parameter server", headers=("what", "takes", "beside", ""), rows=tuple(rows), numbers=numbers))
