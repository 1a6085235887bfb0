"""What the ranks of a run do:  python -m faulty.training TRAINING.json

does it as one rank under MPI; of an elastic run, `faulty.leading` hands `train` to the ranks.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tatami
from tatami.cluster import Cluster, Link, Processor
from tatami.lab.enter import join
from tatami.tiling import Layout

NET, INPUTS, UNITS, OUTPUTS = "203-800-26", 203, 800, 26
LINK = Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6)
STEP = "a step is done"
"""What rank 0 prints after each step where there are faults."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the ranks of one run do, as they read it.

    Attributes:
        samples: of the global batch.
        steps: how many.
        speeds: of the hosts.
        quotas: of the hosts: the files into which a process writes its number to come under the host's quota. None: it is so.
        layout: of the processors, which have the names of their hosts; None: as planned.
        every_s: from fault to fault; None: there are none.
        folder: where the ranks leave what they have to tell.
    """

    samples: int
    steps: int
    speeds: Mapping[str, float]
    quotas: Mapping[str, list[str]] | None
    layout: str | None
    every_s: float | None
    folder: str

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def pid_file(self, member: str) -> Path:
        """Where a rank of an elastic run leaves the number of its process."""
        return self.path / f"pid-{member}"

    def write(self) -> str:
        """Keep it in its folder; gives the file."""
        file = self.path / "training.json"
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return str(file)

    @classmethod
    def read(cls, file: str) -> Training:
        """What `write` has kept."""
        return cls(**json.loads(Path(file).read_text(encoding="utf-8")))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, UNITS), nn.Sigmoid(), nn.Linear(UNITS, OUTPUTS)).double()


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(samples, INPUTS) and (samples,): the same in every step."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randint(OUTPUTS, (samples,), generator=generator)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def cluster_of(speeds: Mapping[str, float], *, hosts: Sequence[str]) -> Cluster:
    """A processor for each of `hosts`, in this order; it has the name of its host, unless that has another one already."""
    names = [host if host not in hosts[:rank] else f"{host}/{rank}" for rank, host in enumerate(hosts)]
    pairs = zip(names, hosts, strict=True)
    processors = tuple(Processor(name=name, speed=speeds[host], host=host) for name, host in pairs)
    return Cluster(processors=processors, network=LINK)


def train(training: Training) -> None:
    """One rank, under MPI or of an elastic run."""
    import_module("torch._dynamo")  # the first step of an optimizer loads it
    torch.set_num_threads(1)
    module, (x, y) = network(), batch(training.samples)
    if training.quotas is not None:
        join(training.quotas[socket.gethostname()])
    comm: Any = tatami.init(timeout_s=120.0)
    if training.every_s is not None:
        training.pid_file(comm.names[comm.rank]).write_text(str(os.getpid()))
    model = tatami.tile(
        module,
        comm,
        batch_size=training.samples,
        speeds=cluster_of(training.speeds, hosts=comm.hosts),
        layout=None if training.layout is None else Layout.from_json(training.layout),
        reduction="mean",
        quiet=True,
    )
    optimizer = optimizer_of(model)
    for step in tatami.steps(model, optimizer, count=training.steps):
        with step:
            inputs, targets = model.local(x, y)
            loss = nn.functional.cross_entropy(model(inputs), targets) if len(targets) else model(inputs).sum()
            loss.backward()
            step.update(loss)
        if step.is_done and comm.rank == 0:
            with (training.path / "marks").open("a") as file:
                print(step.number, time.time(), repr(step.loss), ",".join(comm.hosts), file=file)
            if training.every_s is not None:
                print(STEP, flush=True)


def plain(samples: int, *, steps: int) -> list[float]:
    """The losses of one process, with all threads."""
    model, (x, y) = network(), batch(samples)
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    train(Training.read(sys.argv[1]))
