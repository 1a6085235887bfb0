"""`tatami bench train`: a step of training, against the plain torch loop (one rank) and DistributedDataParallel over gloo.

All contestants train the same network from the same weights on the same global batches, with one thread a rank, in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed
from torch import nn

from tatami.bench.interleaved import interleaved, machine, start_gloo
from tatami.comm.base import AbstractCommunicator
from tatami.runtime.losses import Loss
from tatami.tiling import DEFAULT_PLANNER
from tatami.train import TiledModel, Trainer, tile
from tatami.workload import parse_net


@dataclass(frozen=True, kw_only=True)
class TrainBenchmark:
    """One network, on the ranks of a communicator.

    Attributes:
        net: sizes of the layers, "203-80-26"; or another network in words.
        batch_size: the global batch.
        rounds: timings of each contestant, whose median counts.
        seconds: about how long one timing takes.
        planner: for the tiled runs.
        batch_norm: see `tatami.tile`.
    """

    net: str
    batch_size: int
    rounds: int = 7
    seconds: float = 0.5
    planner: str = DEFAULT_PLANNER
    batch_norm: Literal["global", "local"] = "global"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainSubject:
    """What all contestants train.

    Attributes:
        model: with the weights that all begin with; it is not changed.
        x, y: the global batch, (samples, ...).
        loss: a mean over samples.
        sample: what `tatami.tile` follows the network with; None: nothing.
    """

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    loss: Loss
    sample: torch.Tensor | None = None


def perceptron(benchmark: TrainBenchmark) -> TrainSubject:
    """The perceptron of `benchmark.net`, on random numbers."""
    sizes = parse_net(benchmark.net)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
    x = torch.rand(benchmark.batch_size, sizes[0], generator=generator)
    y = torch.rand(benchmark.batch_size, sizes[-1], generator=generator)
    return TrainSubject(model=_mlp(sizes), x=x, y=y, loss=nn.MSELoss())


def bench_train(
    benchmark: TrainBenchmark, comm: AbstractCommunicator, *, subject: TrainSubject | None = None
) -> dict[str, Any]:
    """Step times of all contestants and their ratios to Tatami's. Collective; the record is the same on every rank.

    One rank: the plain torch loop. Several: DistributedDataParallel over gloo, and what no one can beat: ranks that train their
    share of the batch and send nothing. In both cases Tatami runs as a hand-written loop and as its Trainer.

    Args:
        benchmark: what is timed how often.
        comm: the ranks.
        subject: what is trained; None: the `perceptron` of the benchmark.
    """
    subject = subject or perceptron(benchmark)
    tiled = _tiled(subject, comm, benchmark)
    contestants: dict[str, Callable[[int], None]] = {
        "tatami": _steps(tiled, subject, local=tiled.local),
        "tatami-trainer": _tatami_trainer(subject, comm, benchmark),
    }
    if comm.size == 1:
        contestants["plain"] = _steps(copy.deepcopy(subject.model), subject)
    else:
        start_gloo(comm)
        x, y = (each.chunk(comm.size)[comm.rank].clone() for each in (subject.x, subject.y))
        own = replace(subject, x=x, y=y)
        contestants["ddp-gloo"] = _steps(nn.parallel.DistributedDataParallel(copy.deepcopy(subject.model)), own)
        contestants["compute"] = _steps(copy.deepcopy(subject.model), own)
    try:
        repeats = _repeats(contestants["tatami"], benchmark.seconds, comm)
        timed = interleaved(contestants, rounds=benchmark.rounds, repeats=repeats, before=comm.barrier)
    finally:
        if comm.size > 1:
            torch.distributed.destroy_process_group()
    rival = "plain" if comm.size == 1 else "ddp-gloo"
    slowest = {name: max(comm.allgather_object(each.median_s)) for name, each in timed.items()}
    bound = {f"compute_speed_over_{rival}": slowest[rival] / slowest["compute"]} if "compute" in timed else {}
    return {
        "benchmark": "train",
        **asdict(benchmark),
        "ranks": comm.size,
        "threads_per_rank": torch.get_num_threads(),
        "repeats": repeats,
        **{f"{name}_median_s": slowest[name] for name in timed},
        **{f"{name}_spread": timed[name].spread for name in timed},
        f"speed_over_{rival}": slowest[rival] / slowest["tatami"],
        f"trainer_speed_over_{rival}": slowest[rival] / slowest["tatami-trainer"],
        **bound,
        "machine": machine(),
    }


def _mlp(sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers)


def _steps(model: nn.Module, subject: TrainSubject, *, local: Callable[..., Any] | None = None) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(times: int) -> None:
        for _ in range(times):
            here_x, here_y = (subject.x, subject.y) if local is None else local(subject.x, subject.y)
            optimizer.zero_grad()
            subject.loss(model(here_x), here_y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def _tiled(subject: TrainSubject, comm: AbstractCommunicator, benchmark: TrainBenchmark) -> TiledModel:
    return tile(
        subject.model,
        comm,
        batch_size=benchmark.batch_size,
        sample=subject.sample,
        speeds="equal",
        planner=benchmark.planner,
        reduction="mean",
        batch_norm=benchmark.batch_norm,
        quiet=True,
    )


def _tatami_trainer(subject: TrainSubject, comm: AbstractCommunicator, benchmark: TrainBenchmark) -> Callable[[int], None]:
    tiled = _tiled(subject, comm, benchmark)
    trainer = Trainer(tiled, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss=subject.loss)

    def run(times: int) -> None:
        trainer.fit((subject.x, subject.y), batch_size=benchmark.batch_size, iterations=times)

    return run


def _repeats(run: Callable[[int], None], seconds: float, comm: AbstractCommunicator) -> int:
    """How many steps take about `seconds`, the same on every rank."""
    probe = interleaved({"probe": run}, rounds=1, repeats=3, before=comm.barrier)["probe"]
    return int(comm.bcast_object(max(3, round(seconds / probe.median_s))))
