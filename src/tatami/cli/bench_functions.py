"""`tatami bench functions`: what gradients cost that travel between ranks, by size of the message."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from tatami.cli.options import AsJson, Rounds, Seconds, epilog, given_sizes, optional
from tatami.cli.terminal import show, show_json
from tatami.report.tables import Table, table_of
from tatami.units import format_duration, format_size

if TYPE_CHECKING:
    from tatami.comm import AbstractCommunicator

FUNCTIONS_EPILOG = epilog(
    "tatami bench functions",
    "tatami bench functions --sizes 8B,1MiB --json",
)


def bench_functions(
    *,
    sizes: Annotated[str | None, optional(metavar="A,B,...", help="Sizes of the message. Default: 8 B to 4 MiB.")] = None,
    rounds: Rounds = 7,
    seconds: Seconds = 0.05,
    as_json: AsJson = False,
) -> None:
    """Time send and recv, forward and backward, between 2 ranks, against as many bare messages of mpi4py and of gloo.

    Then a step of a network of two halves on 2 ranks, against its bound: both halves' computation and the bare messages.
    """
    from tatami.bench.functions import SIZES_BYTES, FunctionsBenchmark
    from tatami.bench.functions import bench_functions as measure
    from tatami.cli.ranks import on_ranks

    benchmark = FunctionsBenchmark(
        sizes_bytes=SIZES_BYTES if sizes is None else given_sizes("--sizes", sizes), rounds=rounds, seconds=seconds
    )
    benchmark.check(ranks=2)
    # Several threads of torch in each rank would share cores with the other rank.
    os.environ.setdefault("TATAMI_THREADS", "1")

    def body(comm: AbstractCommunicator) -> None:
        records = []
        for record in measure(benchmark, comm):
            records.append(record)
            if as_json and comm.rank == 0:
                show_json(record)
        if comm.rank == 0 and not as_json:
            show(_table(records[:-1]), _step(records[-1]))

    on_ranks(body, ranks=2, backend="mpi", hosts=None)


def _table(records: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for record in records:
        names = ("tatami", "mpi4py", "gloo", "autograd")
        ours_s, bare_s, gloo_s, autograd_s = (record[f"{name}_median_s"] for name in names)
        rows.append(
            {
                "size": format_size(record["size_bytes"], digits=3),
                "tatami": format_duration(ours_s, digits=3),
                "mpi4py": format_duration(bare_s, digits=3),
                "gloo": format_duration(gloo_s, digits=3),
                "over mpi4py": format_duration(max(0.0, ours_s - bare_s), digits=3),
                "autograd\nof a rank": format_duration(autograd_s, digits=3),
                "time over\nmpi4py": f"{ours_s / bare_s:.2f} x",
                "speed over\ngloo": f"{gloo_s / ours_s:.2f} x",
            }
        )
    return table_of("a round trip forward and backward, against two bare round trips; medians", rows, texts=())


def _step(record: dict[str, Any]) -> str:
    step_s, bound_s = record["step_median_s"], record["bound_s"]
    return (
        f"a step of {record['net']} on 2 ranks: {format_duration(step_s, digits=3)}, {step_s / bound_s - 1:+.1%} over its "
        f"bound of {format_duration(bound_s, digits=3)}"
    )
