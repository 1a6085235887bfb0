"""In debug mode a gradient that is NaN or infinite is found before it is averaged, and all ranks hear where."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.errors import NotFiniteError
from tatami.parallel import DataParallel, MultiNodeOptimizer, average_gradients
from tatami.testing.worlds import World


@contextmanager
def by_variable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TATAMI_DEBUG", "1")
        yield


def average(model: nn.Module, comm: AbstractCommunicator, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.get_parameter("bias").grad = torch.tensor([0.0, value])
    average_gradients(model, comm)


def step(model: nn.Module, comm: AbstractCommunicator, value: float) -> None:
    optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), comm, model=model)
    model.get_parameter("bias").grad = torch.tensor([0.0, value])
    try:
        optimizer.step()
    finally:
        optimizer.close()


def backward(model: nn.Module, comm: AbstractCommunicator, value: float) -> None:
    wrapped = DataParallel(model, comm)
    try:
        (wrapped(torch.ones(1, 2)) * torch.tensor([1.0, value])).sum().backward()
    finally:
        wrapped.close()


HOW = [functions.debug, by_variable]
WAYS = [average, step, backward]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("debugging", HOW)
@pytest.mark.parametrize("way", WAYS)
def test_the_rank_and_the_parameter_are_named(
    world: World, way: Callable[..., None], debugging: Callable[[], Iterator[None]], value: float
) -> None:
    def body(comm: AbstractCommunicator) -> str:
        last = comm.rank == comm.size - 1
        with pytest.raises(NotFiniteError) as told:
            way(nn.Linear(2, 2), comm, value if last else 1.0)
        assert told.value.rank == comm.size - 1
        return str(told.value)

    with debugging():  # type: ignore[attr-defined]
        for text in world(body):
            # Backward comes to both parameters of the layer, in an order of its own.
            names = ("bias", "weight") if way is backward else ("bias",)
            assert any(
                f"the gradient of {name} on rank {world.size - 1} of {world.size} is not finite" in text for name in names
            )


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("way", WAYS)
def test_finite_gradients_pass_and_nothing_is_looked_at_otherwise(world: World, way: Callable[..., None]) -> None:
    def body(comm: AbstractCommunicator) -> None:
        way(nn.Linear(2, 2), comm, 1.0)

    with functions.debug():
        world(body)
    with functions.debug(False), by_variable():
        world(lambda comm: way(nn.Linear(2, 2), comm, float("nan")))
