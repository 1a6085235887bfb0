"""`tatami bench`: Tatami against what one would run instead."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.numbers import MOST_RANKS, finite
from tatami.cli.terminal import show, show_json, tell
from tatami.report import Table
from tatami.units import format_duration
from tatami.workload import parse_net

if TYPE_CHECKING:
    from tatami.bench.train import TrainBenchmark

EPILOG = """
[bold]Examples[/]

tatami bench train

tatami bench train -n 2 --net 203-800-26 --batch-size 4096 --json
"""
NETS = ("203-80-26", "203-800-26")
RANKS = (1, 2)

bench = typer.Typer(help="Measure Tatami against what one would run instead.", no_args_is_help=True)


@bench.command(name="train", epilog=EPILOG)
def bench_train(
    *,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "-n", "--ranks", min=1, max=MOST_RANKS, metavar="N", help="How many; may be given again. Default: 1, then 2."
        ),
    ] = None,
    net: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="May be given again. Default: 203-80-26, then 203-800-26."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="The global batch.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Timings to take the median of.")] = 7,
    seconds: Annotated[
        float, typer.Option(callback=finite, min=0.001, metavar="S", help="About how long one timing takes.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each measurement.")] = False,
) -> None:
    """Time steps of training: one rank against the plain torch loop, several against DistributedDataParallel over gloo.

    The contestants take turns, on the same batches from the same weights, with one thread each.
    """
    from tatami.bench.train import TrainBenchmark
    from tatami.cli.ranks import num_started

    nets = net or list(NETS)
    for each in nets:
        parse_net(each)
    os.environ.setdefault("TATAMI_THREADS", "1")
    benchmarks = [TrainBenchmark(net=each, batch_size=batch_size, rounds=rounds, seconds=seconds) for each in nets]
    started = num_started()
    counts = ranks or RANKS if started is None else (started,)
    records = []
    for count in counts:
        for benchmark in benchmarks:
            record = _measured(benchmark, count)
            if record is None:
                continue
            records.append(record)
            if as_json:
                show_json(record)
    if records and not as_json:
        show(_table(records))


def _measured(benchmark: TrainBenchmark, ranks: int) -> dict[str, Any] | None:
    """The record, on rank 0 or in the process that started the ranks; None on other ranks."""
    from tatami.bench.train import bench_train
    from tatami.cli.ranks import is_rank
    from tatami.comm import init, launch

    if is_rank():
        comm = init()
        record = bench_train(benchmark, comm)
        return record if comm.rank == 0 else None
    tell(f"{benchmark.net}, {ranks} rank{'s' if ranks > 1 else ''} ...", style="dim")
    if ranks == 1:
        return bench_train(benchmark, init(backend="single"))
    said = io.StringIO()
    command = ["-m", "tatami", "bench", "train", "-n", str(ranks), "--net", benchmark.net, "--json"]
    command += [
        "--batch-size",
        str(benchmark.batch_size),
        "--rounds",
        str(benchmark.rounds),
        "--seconds",
        str(benchmark.seconds),
    ]
    with contextlib.redirect_stdout(said):
        code = launch.run(command, ranks=ranks)
    if code != 0:
        print(said.getvalue(), end="", file=sys.stderr)
        raise typer.Exit(code)
    record = json.loads(said.getvalue().splitlines()[-1])
    assert isinstance(record, dict)
    return record


def _table(records: list[dict[str, Any]]) -> Table:
    rows = []
    for record in records:
        rival = "plain" if record["ranks"] == 1 else "ddp-gloo"
        rows.append(
            (
                record["net"],
                str(record["batch_size"]),
                str(record["ranks"]),
                rival,
                format_duration(record[f"{rival}_median_s"], digits=3),
                format_duration(record["tatami_median_s"], digits=3),
                f"{record[f'speed_over_{rival}']:.2f} x",
                f"{record[f'trainer_speed_over_{rival}']:.2f} x",
            )
        )
    machine = records[0]["machine"]
    return Table(
        title=f"a step of training; medians of {records[0]['rounds']}; {machine['cores']} cores, torch {machine['torch']}",
        headers=("network", "batch", "ranks", "against", "its step", "Tatami's\nstep", "Tatami's\nspeed", "Trainer's\nspeed"),
        rows=tuple(rows),
        numbers=frozenset({1, 2, 4, 5, 6, 7}),
    )
