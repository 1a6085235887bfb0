"""`tatami bench`: compare Tatami with the alternatives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.options import MOST_RANKS, Rounds, epilog, finite
from tatami.cli.terminal import show, show_json, tell
from tatami.report.tables import Table, table_of
from tatami.units import format_duration
from tatami.workload import parse_net

if TYPE_CHECKING:
    from tatami.bench.train import TrainBenchmark, TrainSubject
    from tatami.cli.tasks import Task

EPILOG = epilog(
    "tatami bench train",
    "tatami bench train -n 2 --net 203-800-26 --batch-size 4096 --json",
    "tatami bench train -n 1 --model gpt --model cnn",
)
NETS = ("203-80-26", "203-800-26")
RANKS = (1, 2)
BATCH_SIZE = 4096

bench = typer.Typer(help="Compare the speed of Tatami with the alternatives.", no_args_is_help=True)


@bench.command(name="train", epilog=EPILOG)
def bench_train(
    *,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "-n", "--ranks", min=1, max=MOST_RANKS, metavar="N", help="Number of ranks; may be repeated. Default: 1, then 2."
        ),
    ] = None,
    net: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="Layer sizes; may be repeated. Default: 203-80-26, then 203-800-26."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model: gpt, mlp or cnn, as in tatami train, in addition to --net or instead of it."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Size of the global batch. Default: 4096; gpt 16, cnn 64.")
    ] = None,
    rounds: Rounds = 7,
    seconds: Annotated[
        float, typer.Option(callback=finite, min=0.001, metavar="S", help="Approximate length of a timing.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each measurement.")] = False,
) -> None:
    """Time training steps: one rank against the plain torch loop, several against DistributedDataParallel over gloo.

    The contestants take turns, on the same batches from the same weights, with one thread each. Speeds are relative to the
    alternative; "nothing sent" is the speed of ranks that do not communicate, which is the upper limit.
    """
    from tatami.bench.train import TrainBenchmark
    from tatami.cli.ranks import num_started
    from tatami.cli.tasks import task_of
    from tatami.cli.train_job import TrainJob

    nets = net or ([] if model else list(NETS))
    for each in nets:
        parse_net(each)
    tasks: list[tuple[list[str], str, Task | None]] = [(["--net", each], each, None) for each in nets]
    for name in model or ():
        task = task_of(TrainJob(model=name))
        tasks.append((["--model", name], task.net, task))
    os.environ.setdefault("TATAMI_THREADS", "1")
    started = num_started()
    counts = ranks or RANKS if started is None else (started,)
    records = []
    for count in counts:
        for asked, words, wanted in tasks:
            size = batch_size or (wanted.batch_size if wanted is not None else None) or BATCH_SIZE
            benchmark = TrainBenchmark(net=words, batch_size=size, rounds=rounds, seconds=seconds)
            record = _measured(benchmark, count, asked=asked, task=wanted)
            if record is None:
                continue
            records.append(record)
            if as_json:
                show_json(record)
    if records and not as_json:
        show(_table(records))


def _measured(benchmark: TrainBenchmark, ranks: int, *, asked: list[str], task: Task | None) -> dict[str, Any] | None:
    """Return the record, on rank 0 or in the process that started the ranks; None on other ranks.

    Args:
        benchmark: the settings of the measurement.
        ranks: the number of ranks.
        asked: the option that selected the network.
        task: the task to train; None: the perceptron of the benchmark.
    """
    from tatami.bench.train import bench_train
    from tatami.cli.ranks import is_rank, start_ranks
    from tatami.comm import init

    subject = None if task is None else subject_of(task, benchmark.batch_size)
    if is_rank():
        comm = init()
        record = bench_train(benchmark, comm, subject=subject)
        return record if comm.rank == 0 else None
    tell(f"{benchmark.net}, {ranks} rank{'s' if ranks > 1 else ''} ...", style="dim")
    if ranks == 1:
        return bench_train(benchmark, init(backend="single"), subject=subject)
    said = io.StringIO()
    settings = {"-n": ranks, "--batch-size": benchmark.batch_size, "--rounds": benchmark.rounds, "--seconds": benchmark.seconds}
    command = ["-m", "tatami", "bench", "train", *asked, "--json"]
    command += [text for name, value in settings.items() for text in (name, str(value))]
    with contextlib.redirect_stdout(said):
        code = start_ranks(command, ranks=ranks)
    if code != 0:
        print(said.getvalue(), end="", file=sys.stderr)
        raise typer.Exit(code)
    record = json.loads(said.getvalue().splitlines()[-1])
    assert isinstance(record, dict)
    return record


def subject_of(task: Task, batch_size: int) -> TrainSubject:
    """Make a benchmark's subject of a task: one batch of its samples, repeated if there are too few."""
    import torch

    from tatami.bench.train import TrainSubject

    torch.manual_seed(0)
    chosen = torch.arange(batch_size) % task.train.samples
    x, y = task.train.x[chosen], task.train.y[chosen]
    sample = None if task.is_perceptron else task.train.x[:4]
    return TrainSubject(model=task.make(), x=x, y=y, loss=task.loss, sample=sample)


def _nothing_sent(record: dict[str, Any]) -> str:
    return "" if record["ranks"] == 1 else f"{record['compute_speed_over_ddp-gloo']:.2f} x"


def _table(records: list[dict[str, Any]]) -> Table:
    rows = []
    several = any(record["ranks"] > 1 for record in records)
    for record in records:
        rival = "plain" if record["ranks"] == 1 else "ddp-gloo"
        rows.append(
            {
                "network": record["net"],
                "batch": str(record["batch_size"]),
                "ranks": str(record["ranks"]),
                "against": rival,
                "its step": format_duration(record[f"{rival}_median_s"], digits=3),
                "Tatami's\nstep": format_duration(record["tatami_median_s"], digits=3),
                "Tatami's\nspeed": f"{record[f'speed_over_{rival}']:.2f} x",
                "Trainer's\nspeed": f"{record[f'trainer_speed_over_{rival}']:.2f} x",
                **({"nothing\nsent": _nothing_sent(record)} if several else {}),
            }
        )
    machine = records[0]["machine"]
    title = f"a step of training; medians of {records[0]['rounds']}; {machine['cores']} cores, torch {machine['torch']}"
    return table_of(title, rows, texts=("network", "against"))
