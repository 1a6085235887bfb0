"""`tatami bench dataparallel`: a data-parallel step, against DistributedDataParallel over gloo."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.options import Hosts, Ranks, Rounds, epilog
from tatami.cli.terminal import show, show_json, tell
from tatami.report.tables import Table, table_of
from tatami.units import format_duration
from tatami.workload import parse_net

if TYPE_CHECKING:
    from tatami.comm import AbstractCommunicator

DATA_PARALLEL_EPILOG = epilog(
    "tatami bench dataparallel",
    "tatami bench dataparallel -n 4 --net 1M --net 1000-4000-10 --json",
)


def bench_data_parallel(
    *,
    ranks: Ranks = None,
    hosts: Hosts = None,
    net: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="1M, 25M or sizes of layers; may be given again. Default: 1M, then 25M."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Samples of each rank.")] = 64,
    rounds: Rounds = 9,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Steps in one timing.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each contestant.")] = False,
) -> None:
    """Time data-parallel steps: without communication, by Tatami, and by DistributedDataParallel over gloo.

    They take turns, on the same batches from the same weights, with one thread a rank. The exposed part of communication is
    what a step takes more than the same step without any.
    """
    from tatami.bench.data_parallel import NETS, DataParallelBenchmark
    from tatami.bench.data_parallel import bench_data_parallel as measure
    from tatami.cli.ranks import num_started, on_ranks

    benchmarks = [
        DataParallelBenchmark(net=NETS.get(each, each), batch_size=batch_size, rounds=rounds, repeats=repeats)
        for each in net or NETS
    ]
    for benchmark in benchmarks:
        parse_net(benchmark.net)

    def body(comm: AbstractCommunicator) -> None:
        records: list[dict[str, Any]] = []
        for benchmark in benchmarks:
            if comm.rank == 0:
                tell(f"{benchmark.net} ...", style="dim")
            taken = measure(benchmark, comm)
            records += taken
            if comm.rank == 0 and as_json:
                for record in taken:
                    show_json(record)
        if comm.rank == 0 and not as_json:
            show(_table(records))

    os.environ.setdefault("TATAMI_THREADS", "1")
    on_ranks(body, ranks=ranks or num_started() or 2, backend="mpi", hosts=hosts)


def _table(records: Sequence[dict[str, Any]]) -> Table:
    first = records[0]
    rows = []
    for record in records:
        alone = record["contestant"] == "compute"
        rows.append(
            {
                "parameters": f"{record['parameters'] / 1e6:.1f} M",
                "contestant": record["contestant"],
                "step": format_duration(record["step_s"], digits=3),
                "exposed\ncommunication": "" if alone else format_duration(max(0.0, record["exposed_s"]), digits=3),
                "of\nDDP's": "" if alone else f"{record['exposed_over_ddp']:.2f}",
            }
        )
    title = f"a step on {first['ranks']} ranks, {first['batch_size']} samples each; medians of {first['rounds']}"
    return table_of(title, rows, texts=("contestant",))
