"""Ranks whose optimizers step otherwise than those of others are told so, by name: by data parallelism, and of tiled models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drawing import mlp
from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.comm.agreement import is_due
from tatami.errors import InputError, NotFiniteError
from tatami.parallel import DataParallel, MultiNodeOptimizer, average_gradients
from tatami.same_steps import StepNumbers, refuse_other_steps
from tatami.testing.worlds import World
from tiled_rig import simple_layout, tiled

SAMPLES = 12
mse: Any = F.mse_loss  # as torch has no type for `backward`
Step = Callable[[], float]
"""One step of training on this rank; returns the loss of this rank's samples."""
network = partial(mlp, 4, 8, 3)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    return x, y


def stepping(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Step:
    def step() -> float:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def data_parallel(comm: AbstractCommunicator) -> tuple[Step, torch.optim.Optimizer]:
    model = DataParallel(network(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepping(model, optimizer, *model.local(*samples())), optimizer


def multi_node_optimizer(comm: AbstractCommunicator) -> tuple[Step, torch.optim.Optimizer]:
    model = network()
    optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
    x, y = (tensor[comm.rank :: comm.size] for tensor in samples())
    return stepping(model, optimizer, x, y), optimizer


def tiles(comm: AbstractCommunicator) -> tuple[Step, torch.optim.Optimizer]:
    replicas = [[0, 1], *([rank] for rank in range(2, comm.size))] if comm.size > 2 else [[rank] for rank in range(comm.size)]
    model = tiled(network(), comm, layout=simple_layout(*replicas), batch_size=SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepping(model, optimizer, *model.local(*samples())), optimizer


WAYS = [data_parallel, multi_node_optimizer, tiles]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("way", WAYS)
def test_a_learning_rate_by_the_loss_of_a_rank_is_found(comm: AbstractCommunicator, way: Any) -> None:
    last = comm.size - 1
    step, optimizer = way(comm)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for number in range(7):
        if number == 4:
            schedule.step(0.0)
            schedule.step(1.0 if comm.rank == last else -1.0)  # the last rank's has risen
        step()
    with pytest.raises(InputError, match=rf"lr of SGD is 0\.05 on rank {last}, 0\.1 on rank 0"):
        step()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_a_rank_leaves_out_is_found(comm: AbstractCommunicator, way: Any) -> None:
    step, optimizer = way(comm)
    name = "step" if not isinstance(optimizer, MultiNodeOptimizer) else "optimizer.step"
    owner = optimizer if name == "step" else optimizer.optimizer
    for number in range(3):
        if comm.rank == 1 and number == 1:
            owner.step, original = (lambda: None), owner.step
            step()
            owner.step = original
        else:
            step()
    with pytest.raises(InputError, match="SGD has made 2 steps on rank 1, SGD 3 on rank 0"):
        step()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_step_alike_go_on(comm: AbstractCommunicator, way: Any) -> None:
    step, optimizer = way(comm)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(9):
        step()
        schedule.step()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_global_loss_is_that_of_the_plain_run(comm: AbstractCommunicator, reduction: Any) -> None:
    x, y = samples()
    expected = float(mse(network()(x), y, reduction="none").mean(1).sum() / (SAMPLES if reduction == "mean" else 1))
    replicas = [[0, 1], *([rank] for rank in range(2, comm.size))] if comm.size > 1 else [[0]]
    model = tiled(network(), comm, layout=simple_layout(*replicas), batch_size=SAMPLES, reduction=reduction)
    here_x, here_y = model.local(x, y)
    each = mse(model(here_x), here_y, reduction="none").mean(1)
    loss = each.mean() if reduction == "mean" else each.sum()
    loss.backward()
    told = model.global_loss(loss)
    assert comm.allgather_object(told) == [told] * comm.size
    assert told == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=3), st.integers(0, 3), st.floats(2e-6, 1.0))
def test_any_other_number_is_found_and_rounding_is_none(numbers: list[float], steps: int, by: float) -> None:
    def told(factor: float, *, steps: int = steps) -> tuple[StepNumbers, ...]:
        settings = ({"lr": (numbers[0],), "betas": (*numbers[1:], numbers[-1] * factor)},)
        return (StepNumbers(name="Adam", steps=steps, settings=settings),)

    refuse_other_steps([told(1.0), told(1.0 + 1e-9), ()] if steps == 0 else [told(1.0), told(1.0 + 1e-9)])
    with pytest.raises(InputError, match=r"betas of Adam is .* on rank 2"):
        refuse_other_steps([told(1.0), told(1.0), told(1.0 + by)])
    with pytest.raises(InputError, match=f"Adam has made {steps + 1} steps on rank 1, Adam {steps} on rank 0"):
        refuse_other_steps([told(1.0), told(1.0, steps=steps + 1)])


def test_ranks_compare_in_few_passes() -> None:
    assert [number for number in range(1, 200) if is_due(number)] == [1, 2, 4, 8, 16, 32, 64, 128, 192]


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
REDUCTIONS = [average, step, backward]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("debugging", HOW)
@pytest.mark.parametrize("way", REDUCTIONS)
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
@pytest.mark.parametrize("way", REDUCTIONS)
def test_finite_gradients_pass_and_nothing_is_looked_at_otherwise(world: World, way: Callable[..., None]) -> None:
    def body(comm: AbstractCommunicator) -> None:
        way(nn.Linear(2, 2), comm, 1.0)

    with functions.debug():
        world(body)
    with functions.debug(False), by_variable():
        world(lambda comm: way(nn.Linear(2, 2), comm, float("nan")))
