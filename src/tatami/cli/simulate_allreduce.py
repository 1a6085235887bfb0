"""`tatami simulate allreduce`: compare all-reduces and grids on a cluster that does not exist yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.options import epilog, given, given_sizes, optional, takes
from tatami.cli.simulate_options import Cores, PlatformFile, SweepOption, chosen_platform, parse_sweep
from tatami.cli.terminal import show, show_json
from tatami.collective import ALGORITHMS, Grid, Sync
from tatami.errors import InputError
from tatami.report import Table, blank, check_path, save
from tatami.report.bar import progress_for
from tatami.report.palette import MOSS
from tatami.units import format_duration, format_size, parse_bandwidth, parse_duration

if TYPE_CHECKING:
    from tatami.sim.allreduce import Case, Replayed
    from tatami.sim.platforms import AbstractPlatform

ALLREDUCE_EPILOG = epilog(
    "tatami simulate allreduce --preset oakforest-like --sizes 102MB --algorithms native,ring,torus,torus_put --grids all",
    "tatami simulate allreduce --preset oakforest-like --nodes 64 --grids 8x8 --sweep latency=250ns,1us,4us --json",
    "tatami simulate allreduce --platform cluster.toml --algorithms ring,halving_doubling,hierarchical --plot sizes.png",
)
MOST_TRANSFERS = 1_000_000
"""Most transfers of a simulated all-reduce: a core simulates 4,000 to 13,000 in a second."""
_GRIDDED = "torus"
_SWEPT: dict[str, Callable[[str], Any]] = {
    "latency": parse_duration,
    "message": parse_duration,
    "native": str,
    "nodes": int,
    "put": parse_duration,
    "sum": parse_bandwidth,
    "sync": Sync,
}
_OF_SOFTWARE = {"message": "message_s", "put": "put_s", "sum": "sum_bytes_per_s"}


@dataclass(frozen=True, kw_only=True)
class SimulateAllReduceJob:
    """The options of `tatami simulate allreduce`; their help texts describe the fields."""

    preset: Annotated[str | None, optional(help="Name of a platform: oakforest-like or paper-server-10k.")] = None
    platform: PlatformFile = None
    nodes: Annotated[int | None, optional(min=1, help="Number of nodes in the preset.")] = None
    latency: Annotated[str | None, optional(help="Latency of one cable of the preset.")] = None
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=1, metavar="N", help="Number of ranks, one a host.")] = None
    sizes: Annotated[str, typer.Option(metavar="A,B,...", help="Sizes of each rank's float32 vector.")] = "102 MB"
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help=", ".join(ALGORITHMS))] = "native,torus_put"
    grids: Annotated[
        str | None, typer.Option(metavar="all|2x128,...", help="Grids M x N of the tori.", show_default="the library's choice")
    ] = None
    across: Annotated[str, typer.Option(help="All-reduce in the columns of tori.")] = "ring"
    sync: Annotated[Sync, typer.Option(help="Synchronization of puts: fence, pscw or lock.")] = Sync.PSCW
    native: Annotated[str, typer.Option(help="Native collective: mpich, optimal, ring or whole.")] = "mpich"
    message: Annotated[str, typer.Option(help="Sender's time for each message.")] = "0 s"
    put: Annotated[str, typer.Option(help="Sender's time for each put.")] = "0 s"
    sum_: Annotated[str | None, typer.Option("--sum", help="Rate of additions.", show_default="no time")] = None
    sweep: SweepOption = None
    cores: Cores = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the times (.png, .pdf, .svg).")] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each run, as it ends.")] = False


@takes(SimulateAllReduceJob)
def simulate_allreduce(job: SimulateAllReduceJob) -> None:
    """Simulate all-reduces, transfer by transfer, for several algorithms, grids and sizes."""
    from tatami.sim.allreduce import NATIVES, Case, Software, expand, num_transfers, replay
    from tatami.sim.processes import Runs

    if job.plot is not None:
        check_path(job.plot, force=job.force)
    swept = parse_sweep(job.sweep, known=_SWEPT)
    software = Software(
        message_s=given("--message", parse_duration, job.message),
        put_s=given("--put", parse_duration, job.put),
        sum_bytes_per_s=float("inf") if job.sum_ is None else given("--sum", parse_bandwidth, job.sum_),
    )
    names = [name.strip() for name in job.algorithms.split(",")]
    if unknown := [name for name in names if name not in ALGORITHMS]:
        raise InputError(f"there is no all-reduce {unknown[0]!r}; choose one of: {', '.join(ALGORITHMS)}")
    cases: list[tuple[str | None, AbstractPlatform, Case]] = []
    for value in swept.values:
        swept_to = {} if value is None else {swept.name: swept.read(_SWEPT[swept.name], value)}
        swept_software = {field: swept_to[name] for name, field in _OF_SOFTWARE.items() if name in swept_to}
        delay_s = swept_to.get("latency", None if job.latency is None else given("--latency", parse_duration, job.latency))
        machines = chosen_platform(job.preset, job.platform, nodes=swept_to.get("nodes", job.nodes), latency_s=delay_s)
        num_ranks = len(machines.hosts) if job.ranks is None else job.ranks
        if num_ranks < 2:
            raise InputError(f"an all-reduce of {num_ranks} rank sends nothing: simulate at least 2 nodes, each a rank")
        if num_ranks > len(machines.hosts):
            raise InputError(f"an all-reduce for {num_ranks} ranks, but {machines.name} has {len(machines.hosts)} hosts")
        for size_bytes in given_sizes("--sizes", job.sizes):
            for name in names:
                for grid in _grids(job.grids, ranks=num_ranks) if name.startswith(_GRIDDED) else [None]:
                    case = Case(
                        algorithm=name,
                        ranks=num_ranks,
                        size_bytes=size_bytes,
                        grid=grid,
                        across=job.across,
                        sync=swept_to.get("sync", job.sync),
                        native=swept_to.get("native", job.native),
                        software=replace(software, **swept_software),
                    )
                    cases.append((value, machines, case))
    jobs = [case.job(machines) for _, machines, case in cases]
    for (_, _, case), each in zip(cases, jobs, strict=True):
        if (transfers := num_transfers(expand(each.schedule, rule=NATIVES[each.native]))) > MOST_TRANSFERS:
            raise InputError(
                f"an all-reduce of {case.ranks:,} ranks by {_label(case)} takes about {transfers:,} transfers, and at most "
                f"{MOST_TRANSFERS:,} are simulated, in a few minutes: simulate fewer ranks (--nodes, -n), or another algorithm"
            )
    progress = progress_for()
    progress.start("simulating", total=len(jobs), unit="runs")

    def done(index: int, result: Replayed) -> None:
        progress.advance(1, fields={"algorithm": result.algorithm})
        if job.as_json:
            value, _, case = cases[index]
            show_json(allreduce_record(case, result) | ({swept.name: value} if swept.name else {}))

    with Runs(cores=job.cores) as started:
        results = started.map(replay, jobs, done=done)
    progress.finish()
    labels = [_label(case) + (f", {swept.name} {value}" if swept.name else "") for value, _, case in cases]
    if not job.as_json:
        show(_table(labels, [case for *_, case in cases], results))
    if job.plot is not None:
        _draw(labels, [case for *_, case in cases], results, path=job.plot, force=job.force)


def allreduce_record(case: Case, result: Replayed) -> dict[str, Any]:
    """Return the `--json` record of a run."""
    return {
        "algorithm": case.algorithm,
        "grid": None if case.grid is None else list(case.grid),
        "ranks": case.ranks,
        "size_bytes": case.size_bytes,
        "across": case.across,
        "sync": case.sync.value,
        "native": case.native,
        "total_s": result.total_s,
        "bytes_moved": result.bytes_moved,
        "phases": [{"what": title, "end_s": end_s} for title, end_s in result.phases],
    }


def _grids(text: str | None, *, ranks: int) -> Sequence[Grid | None]:
    from tatami.sim.allreduce import grids_of

    if text is None:
        return [None]
    if text == "all":
        return grids_of(ranks)
    grids = []
    for each in text.split(","):
        m, _, n = each.strip().partition("x")
        if not (m.isdecimal() and n.isdecimal()):
            raise InputError(f"--grids is all, or MxN,...: 2x128,16x16; not {text!r}")
        grids.append((int(m), int(n)))
    return grids


def _label(case: Case) -> str:
    return case.algorithm if case.grid is None else f"{case.algorithm} {case.grid[0]}x{case.grid[1]}"


def _table(labels: Sequence[str], cases: Sequence[Case], results: Sequence[Replayed]) -> Table:
    """Make a row for each algorithm and a column for each size: time, and speed relative to the first row."""
    sizes = sorted({case.size_bytes for case in cases})
    times: dict[str, dict[int, float]] = {}
    for label, case, result in zip(labels, cases, results, strict=True):
        times.setdefault(label, {})[case.size_bytes] = result.total_s
    first = next(iter(times.values()))
    rows = [
        (label, *(f"{format_duration(found[size], digits=4)}  {first[size] / found[size]:.2f} x" for size in sizes))
        for label, found in times.items()
    ]
    order = [found[sizes[-1]] for found in times.values()]
    return Table(
        title=f"simulated all-reduce of {cases[0].ranks:,} ranks, and its speed over {next(iter(times))}",
        headers=("algorithm", *(format_size(size, digits=3) for size in sizes)),
        rows=tuple(rows),
        numbers=frozenset(range(1, len(sizes) + 1)),
        best=order.index(min(order)),
    )


def _draw(labels: Sequence[str], cases: Sequence[Case], results: Sequence[Replayed], *, path: Path, force: bool) -> None:
    from tatami.report.bandwidth import draw_bandwidth

    figure, ax = blank(width_in=9.0)
    if len({case.size_bytes for case in cases}) > 1:
        records = [
            {"algorithm": label, "size_bytes": case.size_bytes, "bandwidth_bytes_per_s": case.size_bytes / result.total_s}
            for label, case, result in zip(labels, cases, results, strict=True)
        ]
        draw_bandwidth(ax, records)
    else:
        places = range(len(labels))
        ax.barh(list(places), [1000 * result.total_s for result in results], color=MOSS)
        ax.set_yticks(list(places), list(labels))
        ax.invert_yaxis()
        ax.set_xlabel(f"ms for {format_size(cases[0].size_bytes, digits=3)}")
        ax.grid(axis="x", alpha=0.25)
    ax.set_title(f"simulated all-reduce, {cases[0].ranks} ranks", fontsize=10)
    save(figure, path, force=force)
