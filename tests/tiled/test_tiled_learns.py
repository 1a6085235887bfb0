"""Real data: a tiled run learns what the plain torch run from the same seed learns, within half a point."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import plain_fit
from torch import nn

from drawing import one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.datasets import Dataset, load
from tatami.testing.worlds import World
from tatami.train import Trainer, move, tile

CORPUS = Path(os.environ.get("TATAMI_NETTALK", Path(__file__).parents[3] / "shared" / "data" / "nettalk.data"))
HALF_A_POINT = 0.005


def fit_plainly(model: nn.Module, data: Dataset, *, loss: nn.Module, optimizer: Any, batch_size: int, epochs: int) -> None:
    orders = [
        torch.randperm(data.samples, generator=torch.Generator().manual_seed(epoch))
        if batch_size < data.samples
        else torch.arange(data.samples)
        for epoch in range(epochs)
    ]
    batches = ((data.x[here], data.y[here]) for order in orders for here in torch.split(order, batch_size))
    plain_fit(model, batches, loss=lambda model, batch: loss(model(batch[0]), batch[1]), optimizer=optimizer)


@pytest.mark.ranks(2, 3)
def test_nettalk_full_batch_with_squared_error(world: World) -> None:
    if not CORPUS.exists():
        pytest.skip(f"no NETtalk corpus at {CORPUS} (TATAMI_NETTALK names another place)")
    data = load("nettalk", path=CORPUS, samples=1024)
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(203, 80), nn.Sigmoid(), nn.Linear(80, 26), nn.Sigmoid())
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(203, 80), nn.Sigmoid(), nn.Linear(80, 26), nn.Sigmoid())
    # Adam, because plain gradient descent takes thousands of iterations to get here.
    loss, optimizer = nn.MSELoss(reduction="sum"), partial(torch.optim.Adam, lr=0.03)
    fit_plainly(plain, data, loss=loss, optimizer=optimizer, batch_size=1024, epochs=100)
    with torch.no_grad():
        expected = data.accuracy(plain(data.x), data.y)

    def body(comm: AbstractCommunicator) -> dict[str, float]:
        speeds = [1.0, 0.5, 0.25][: comm.size]
        model = tile(built, comm, batch_size=1024, speeds=speeds, quiet=True)
        trainer = Trainer(model, optimizer=optimizer, loss=loss)
        trainer.fit((data.x, data.y), batch_size=1024, iterations=100)
        return trainer.evaluate((data.x, data.y), batch_size=1024, metrics=_metrics(data))

    for reached in world(body):
        assert reached["phoneme"] == pytest.approx(expected["phoneme"], abs=HALF_A_POINT)
        assert reached["stress"] == pytest.approx(expected["stress"], abs=HALF_A_POINT)
    assert expected["phoneme"] > 0.8
    assert expected["stress"] > 0.9


@pytest.mark.ranks(1, 2, 4)
def test_digits_in_shuffled_batches_with_dropout_and_a_retiling(world: World) -> None:
    pytest.importorskip("sklearn", reason="digits come with scikit-learn")
    train, test = load("digits", targets="classes").split(test_fraction=0.25, seed=0)

    @one_at_a_time
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))

    plain, built = build(), build()
    loss, optimizer = nn.CrossEntropyLoss(), partial(torch.optim.Adam, lr=0.003)
    torch.manual_seed(1)
    fit_plainly(plain, train, loss=loss, optimizer=optimizer, batch_size=100, epochs=8)
    plain.eval()
    with torch.no_grad():
        expected = test.accuracy(plain(test.x), test.y)["digit"]
    torch.manual_seed(1)

    def body(comm: AbstractCommunicator) -> float:
        model = tile(built, comm, batch_size=100, speeds=[1.0 + rank for rank in range(comm.size)], quiet=True)
        trainer = Trainer(model, optimizer=optimizer, loss=loss)
        trainer.fit((train.x, train.y), batch_size=100, epochs=4)
        even = tile(built, comm, batch_size=100, speeds="equal", planner="weighted", quiet=True)
        move(model, even.layout, optimizer=trainer.optimizer)
        trainer.fit((train.x, train.y), batch_size=100, epochs=4)
        return trainer.evaluate((test.x, test.y), batch_size=100, metrics=_metrics(test))["digit"]

    assert world(body) == pytest.approx([expected] * world.size, abs=HALF_A_POINT)
    assert expected > 0.9


def _metrics(data: Dataset) -> dict[str, Callable[[torch.Tensor, torch.Tensor], float]]:
    names = data.accuracy(data.y.float() if data.y.ndim > 1 else torch.eye(data.outputs)[data.y], data.y)

    def metric(name: str) -> Callable[[torch.Tensor, torch.Tensor], float]:
        return lambda output, target: data.accuracy(output, target)[name]

    return {name: metric(name) for name in names}
