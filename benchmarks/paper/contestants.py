"""What takes part in the evaluation: tiled training with or without re-mapping, and DistributedDataParallel over gloo.

All run the hand-written loop of the README, from the same weights over the same global batch.
"""

from __future__ import annotations

import copy
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, final

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from paper.breakdown import RankIteration
from paper.setting import DDP, DDP_FLOAT16, DYNAMIC, ORACLE, TIMED_BFLOAT16, layout_of
from tatami.clock import SystemClock
from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.tiling import Span, largest_remainder, spans
from tatami.train import IterationPhase, move, tile
from tatami.train.retiling import Check, Retiling
from tatami.workload import Workload

_LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class PaperTask:
    """What all contestants train: the same tensors on every rank.

    Attributes:
        model: n-m-l with sigmoids, without biases, as in the paper.
        x: (samples, n).
        y: (samples, l).
        workload: the same as facts.
    """

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    workload: Workload


def make_task(sizes: Sequence[int], *, samples: int, workload: Workload, seed: int) -> PaperTask:
    """A network of these sizes with weights and samples from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs, bias=False), nn.Sigmoid()]
        # Of a generator of their own: ranks may be threads, which share torch's, and all must have the same batch.
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(samples, sizes[0], generator=generator)
        y = torch.rand(samples, sizes[-1], generator=generator)
        return PaperTask(model=nn.Sequential(*layers), x=x, y=y, workload=workload)


class AbstractContestant(ABC):
    """One way to train, on the ranks of a communicator."""

    @abstractmethod
    def run(self, times: int) -> None:
        """So many iterations. Collective."""


@final
class Serial(AbstractContestant):
    """The whole network on this rank alone: the T_serial of gamma."""

    def __init__(self, task: PaperTask) -> None:
        self._task = task
        self._model = copy.deepcopy(task.model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=_LEARNING_RATE)
        self._loss = nn.MSELoss()

    def run(self, times: int) -> None:
        for _ in range(times):
            self._optimizer.zero_grad()
            self._loss(self._model(self._task.x), self._task.y).backward()
            self._optimizer.step()


@final
class Tiled(AbstractContestant):
    """Tatami: every rank its tile, re-mapped where the contestant is a dynamic one.

    Attributes:
        iterations: what this rank's stopwatch saw since `iterations` was last cleared.
        sums_loss: whether every iteration sums the loss over the ranks, as the Trainer does; the times that a rule watches go
            with that sum then, and have one of their own otherwise.
    """

    sums_loss = False

    def __init__(self, name: str, task: PaperTask, comm: AbstractCommunicator, *, cluster: Cluster) -> None:
        dynamic = DYNAMIC.get(name)
        halved = name == TIMED_BFLOAT16
        layout = None if halved else layout_of(name, cluster=cluster, workload=task.workload)
        speeds: Cluster | Literal["equal"] = cluster if dynamic is None or dynamic.speeds else "equal"
        samples = task.workload.samples
        self.model = tile(
            task.model, comm, batch_size=samples, speeds=speeds, layout=layout, reduction="mean", quiet=True,
            wire="bfloat16" if halved else None,
        )  # fmt: skip
        self._task = task
        self._loss = nn.MSELoss()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        self._retiling = Retiling(self.model, self._optimizer, retiler=dynamic.retiler) if dynamic is not None else None
        self._clock = SystemClock()
        self.iterations: list[RankIteration] = []

    @property
    def dynamic(self) -> bool:
        """Whether it re-maps while it trains."""
        return self._retiling is not None

    @property
    def checks(self) -> list[Check]:
        """Every look at the balance so far."""
        return [] if self._retiling is None else self._retiling.checks

    @property
    def replicas(self) -> dict[int, int]:
        """The replica of every rank that has a tile."""
        tiles = self.model.tiling.by_processor
        return {rank: tiles[name].replica for rank, name in enumerate(self.model.names) if name in tiles}

    def lay(self, cluster: Cluster) -> None:
        """Lie as is best for these machines, at once. Collective."""
        self._optimizer.zero_grad(set_to_none=True)
        move(self.model, layout_of(ORACLE, cluster=cluster, workload=self._task.workload), optimizer=self._optimizer)

    def run(self, times: int) -> None:
        model, optimizer = self.model, self._optimizer
        start_s = self._clock.now_s()
        for _ in range(times):
            x, y = model.local(self._task.x, self._task.y)
            optimizer.zero_grad()
            loss = self._loss(model(x), y)
            self._differentiate(loss)
            optimizer.step()
            spent = model.phases.finish_iteration()
            if self._retiling is not None:
                self._retiling.record(spent)
            now_s = self._clock.now_s()
            self.iterations.append(RankIteration(wall_s=now_s - start_s, times=spent))
            start_s = now_s

    def _differentiate(self, loss: torch.Tensor) -> None:
        """The sum of the loss travels meanwhile; with the times that a rule watches it leaves when the gradients are there."""
        retiling, watches = self._retiling, self._retiling is not None and self._retiling.watcher is not None
        begun = self._sum(loss) if self.sums_loss and not watches else None
        loss.backward()  # type: ignore[no-untyped-call]
        if self.sums_loss:
            sums, request = begun or self._sum(loss)
            with self.model.phases.during(IterationPhase.GRADIENTS):
                request.wait()
            if retiling is not None:
                retiling.apply_totals(sums.tolist()[1:])

    def _sum(self, loss: torch.Tensor) -> tuple[torch.Tensor, AbstractRequest]:
        told = [] if self._retiling is None else self._retiling.local_report()
        sums = torch.tensor([loss.item(), *told], dtype=torch.float64)
        return sums, self.model.comm.iallreduce(sums)


@final
class Rival(AbstractContestant):
    """torch's DistributedDataParallel over gloo; batches even, or in proportion to speeds and then correctly averaged."""

    def __init__(self, name: str, task: PaperTask, comm: AbstractCommunicator, *, cluster: Cluster) -> None:
        samples = task.workload.samples
        weights = [1.0 if name == DDP else processor.speed for processor in cluster.processors]
        total = sum(weights)
        span: Span = spans(largest_remainder([weight / total for weight in weights], total=samples))[comm.rank]
        self._x, self._y = task.x[span.slice()].clone(), task.y[span.slice()].clone()
        # DDP divides the sum of gradients by the number of ranks; the mean over the batch divides it by the samples.
        self._scale = span.size * comm.size / samples
        self._model = nn.parallel.DistributedDataParallel(copy.deepcopy(task.model))
        if name == DDP_FLOAT16:
            self._model.register_comm_hook(None, fp16_compress_hook)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=_LEARNING_RATE)
        self._loss = nn.MSELoss()

    def run(self, times: int) -> None:
        for _ in range(times):
            self._optimizer.zero_grad()
            loss: Any = self._loss(self._model(self._x), self._y)
            (loss if self._scale == 1.0 else loss * self._scale).backward()
            self._optimizer.step()


def start_rivals(comm: AbstractCommunicator, *, interface: str) -> None:
    """A gloo process group over the ranks of `comm`, through this network interface of every host."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    port = 0
    if comm.rank == 0:
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
    port = comm.bcast_object(port)
    where = f"tcp://{comm.hosts[0]}:{port}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=comm.rank, world_size=comm.size)
