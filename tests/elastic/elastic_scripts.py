"""What the ranks of the tests run, and the plain run that they are compared with."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn

import tatami
from tatami.elastic.moments import Moment
from tatami.elastic.steps import steps
from tatami.tiled import TiledModel, whole_state_dict
from tatami.tiling import Column, Layout

STEPS = 6
SAMPLES = 12
LAYOUTS = {
    1: Layout(columns=(Column(width=1.0, processors=("p0", "p1", "p2"), heights=(0.4, 0.35, 0.25)),)),
    2: Layout(
        columns=(
            Column(width=0.6, processors=("p0", "p1"), heights=(0.55, 0.45)),
            Column(width=0.4, processors=("p2",), heights=(1.0,)),
        )
    ),
    3: Layout(columns=tuple(Column(width=1 / 3, processors=(f"p{i}",), heights=(1.0,)) for i in range(3))),
}


def network() -> nn.Module:
    """With what a forward pass changes besides gradients: running statistics, and random numbers."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4), nn.Dropout(0.25), nn.Linear(4, 2)
    ).to(torch.float64)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)


def optimizer_of(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(module.parameters(), lr=0.02)
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def train(columns: int, kind: str, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run by every rank of an elastic run, and by a single process that has none."""
    comm = tatami.init()
    torch.manual_seed(11)
    layout = LAYOUTS[columns] if comm.size == 3 else None
    model: TiledModel = tatami.tile(
        network(), comm, batch_size=SAMPLES, layout=layout, speeds="equal", reduction="mean", quiet=True
    )
    optimizer = optimizer_of(model, kind)
    losses: dict[int, float] = {}
    loop = steps(model, optimizer, count=count)
    for step in loop:
        with step:
            x, y = model.local(*batch(step.number))
            loss = nn.functional.mse_loss(model(x), y) if len(y) else (model(x) * 0).sum()
            loss.backward()
            step.update(loss)
        if step.is_done:
            assert step.loss is not None
            losses[step.number] = step.loss
    return list(losses.values()), loop.whole(lambda: whole_state_dict(model))


def train_until_alone() -> tuple[int, dict[str, torch.Tensor]]:
    """Two ranks, then three, then two, then one, which ends: at every change of their number the next one is asked for."""
    comm = tatami.init()
    torch.manual_seed(11)
    model = tatami.tile(network(), comm, batch_size=SAMPLES, speeds="equal", reduction="mean", quiet=True)
    optimizer = optimizer_of(model, "sgd")
    loop = steps(model, optimizer, count=100_000)
    seen: list[int] = []
    for step in loop:
        with step:
            time.sleep(0.02)  # the work of a larger network
            x, y = model.local(*batch(step.number))
            loss = nn.functional.mse_loss(model(x), y) if len(y) else (model(x) * 0).sum()
            loss.backward()
            step.update(loss)
        size = model.comm.size
        if size not in seen[-1:]:
            seen.append(size)
            if model.comm.rank == 0:
                print(f"there are {size} ranks", flush=True)
            if model.name == "p2" and size == 2:
                loop.leave()
        if size == 1:
            break
    return loop.number, loop.whole(lambda: whole_state_dict(model))


class Killer:
    """Ends, or stops, members at given moments, each once: as a hook."""

    def __init__(self, *faults: tuple[str, Moment, int], how: int = signal.SIGKILL) -> None:
        self._faults = faults
        self._how = how

    def __call__(self, moment: Moment, name: str, step: int) -> None:
        if (name, moment, step) in self._faults:
            os.kill(os.getpid(), self._how)


def plain(kind: str, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The undisturbed run of one process."""
    return train(0, kind, count)
