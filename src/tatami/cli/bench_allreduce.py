"""`tatami bench allreduce`: time all-reduces in turn, by size of the message."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.options import AsJson, Hosts, Ranks, Rounds, Seconds, epilog, given_sizes, takes
from tatami.cli.terminal import show, show_json, tell
from tatami.errors import InputError
from tatami.report import Table, blank, check_path, draw_bandwidth, save
from tatami.units import format_duration, format_size

if TYPE_CHECKING:
    from tatami.comm import AbstractCommunicator

ALLREDUCE_EPILOG = epilog(
    "tatami bench allreduce -n 2 --sizes 1MiB,16MiB",
    "tatami bench allreduce -n 8 --hosts node1:4,node2:4 --tune",
    'After --tune, algorithm="auto" uses these measurements; tatami tune --show prints them.',
)


@dataclass(frozen=True, kw_only=True)
class BenchAllReduceJob:
    """The options of `tatami bench allreduce`."""

    ranks: Ranks = None
    hosts: Hosts = None
    sizes: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Message sizes. Default: 1 KiB to 256 MiB, each 4 times the last."),
    ] = None
    algorithms: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Algorithms to measure, including 'mpi' and 'gloo'. Default: all."),
    ] = None
    tune: Annotated[bool, typer.Option("--tune", help='Save the times, for algorithm="auto" to choose by.')] = False
    rounds: Rounds = 7
    seconds: Seconds = 0.02
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the bandwidths (.png, .pdf, .svg).")] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False
    as_json: AsJson = False


@takes(BenchAllReduceJob)
def bench_allreduce(job: BenchAllReduceJob) -> None:
    """Time every all-reduce, including MPI's own and gloo's, in place, in turn, in one run.

    Each time is the median over the rounds of the slowest rank; the spread is (slowest - fastest round) / median.
    """
    from tatami.bench.allreduce import SIZES_BYTES, AllReduceBenchmark
    from tatami.bench.allreduce import bench_allreduce as measure
    from tatami.bench.allreduce import tune as keep
    from tatami.cli.ranks import num_started, on_ranks
    from tatami.comm.tuning import cache_directory
    from tatami.outputs import check_folder

    benchmark = AllReduceBenchmark(
        sizes_bytes=SIZES_BYTES if job.sizes is None else given_sizes("--sizes", job.sizes),
        algorithms=() if job.algorithms is None else tuple(name.strip() for name in job.algorithms.split(",")),
        rounds=job.rounds,
        seconds=job.seconds,
    )
    benchmark.check()
    if job.tune and job.algorithms is not None:
        raise InputError("--tune must measure all algorithms to find the best; leave --algorithms out")
    if job.tune:
        check_folder(cache_directory())

    def body(comm: AbstractCommunicator) -> None:
        records = _taken(measure(benchmark, comm), comm, as_json=job.as_json)
        if job.tune:
            _, path = keep(records, comm)
            if comm.rank == 0:
                tell(f"saved for algorithm='auto' in {path}")
        _report(f"all-reduce of float32, {comm.size} ranks", records, comm, job)

    started = num_started()
    if job.plot is not None and started is None:
        check_path(job.plot, force=job.force)
        blank()
    # Several threads of torch in each rank would share cores with the other ranks of all contestants.
    os.environ.setdefault("TATAMI_THREADS", "1")
    on_ranks(body, ranks=job.ranks or started or 2, backend="mpi", hosts=job.hosts)


def _taken(records: Iterable[dict[str, Any]], comm: AbstractCommunicator, *, as_json: bool) -> list[dict[str, Any]]:
    """Collect all records, and show them on rank 0 as they come."""
    taken = []
    last = None
    for record in records:
        taken.append(record)
        if comm.rank != 0:
            continue
        if as_json:
            show_json(record)
        elif record["size_bytes"] != last:
            last = record["size_bytes"]
            tell(f"{format_size(record['size_bytes'], digits=3)} ...", style="dim")
    return taken


def _report(title: str, records: Sequence[dict[str, Any]], comm: AbstractCommunicator, job: BenchAllReduceJob) -> None:
    if comm.rank != 0:
        return
    if not job.as_json:
        show(_table(title, records))
    if job.plot is not None:
        figure, ax = blank(width_in=9.0)
        draw_bandwidth(ax, records)
        ax.set_title(title, fontsize=10)
        save(figure, job.plot, force=job.force)


def _table(title: str, records: Sequence[dict[str, Any]]) -> Table:
    """Make a row for each algorithm and a column for each size: median and spread, below it the bandwidth (size / median)."""
    sizes = sorted({record["size_bytes"] for record in records})
    names = list(dict.fromkeys(record["algorithm"] for record in records))
    by_place = {(record["algorithm"], record["size_bytes"]): record for record in records}
    total_s = {name: sum(by_place[name, size]["median_s"] for size in sizes) for name in names}
    return Table(
        title=title,
        headers=("algorithm", *(format_size(size, digits=3) for size in sizes)),
        rows=tuple((name, *(_cell(by_place[name, size]) for size in sizes)) for name in names),
        numbers=frozenset(range(1, len(sizes) + 1)),
        best=min(range(len(names)), key=lambda index: total_s[names[index]]),
    )


def _cell(record: dict[str, Any]) -> str:
    chosen = f"\n{record['chosen']}" if "chosen" in record else ""
    median = format_duration(record["median_s"], digits=3)
    return f"{median} ±{record['spread']:.0%}\n{format_size(round(record['bandwidth_bytes_per_s']), digits=3)}/s{chosen}"
