"""Terms of a loss that read weights beside the network: their value is of one rank's units, and who tells it is told so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drawing import one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.testing.worlds import World
from tatami.tiled import Trainer, move
from tatami.tiling import Column, Layout
from tiled_rig import tiled

SAMPLES = 8


@one_at_a_time
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return x, y


def one_column(size: int) -> Layout:
    names = tuple(f"p{rank}" for rank in range(size))
    return Layout(columns=(Column(width=1.0, processors=names, heights=(1 / size,) * size),))


def columns(size: int) -> Layout:
    return Layout(columns=tuple(Column(width=1 / size, processors=(f"p{rank}",), heights=(1.0,)) for rank in range(size)))


def squares(model: Any) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        total = total + parameter.square().sum()
    return total


def trainer(comm: AbstractCommunicator, layout: Layout, term: Callable[[Any], torch.Tensor], reduction: Any) -> Trainer:
    def step(model: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y, reduction=reduction) + 0.1 * term(model)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    model = tiled(network(), comm, layout=layout, batch_size=SAMPLES, reduction=reduction)
    return Trainer(model, optimizer=optimizer, training_step=step, reduction=reduction)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("term", [squares, lambda model: next(model.parameters()).norm()])
def test_the_trainer_refuses_a_term_of_weights_that_lie_in_parts(world: World, term: Any) -> None:
    def body(comm: AbstractCommunicator) -> None:
        run = trainer(comm, one_column(comm.size), term, "mean")
        with pytest.raises(InputError, match=r"reads 0\.weight beside the network.* the Trainer would tell a wrong loss"):
            run.fit(data(), batch_size=SAMPLES, iterations=3)
        comm.barrier()  # the ranks are still in step

    world(body)


@pytest.mark.ranks(1, 2, 3)
def test_where_each_rank_has_all_weights_a_term_of_them_is_exact(world: World) -> None:
    x, y = data()
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(x), y) + 0.1 * squares(plain)
        torch.autograd.backward(loss)
        optimizer.step()
        expected.append(loss.item())

    def body(comm: AbstractCommunicator) -> None:
        run = trainer(comm, columns(comm.size), squares, "mean")
        assert run.fit(data(), batch_size=SAMPLES, iterations=3, shuffle=False).losses == pytest.approx(expected, rel=1e-12)
        if comm.size > 1:
            move(run.model, one_column(comm.size), optimizer=run.optimizer)
            with pytest.raises(InputError, match="the Trainer would tell a wrong loss"):
                run.fit(data(), batch_size=SAMPLES, iterations=1)

    world(body)


@pytest.mark.ranks(2)
def test_a_sum_over_samples_would_count_the_term_once_for_each_column(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        with pytest.raises(InputError, match="and every column adds that term to the sum: the Trainer would tell a wrong loss"):
            trainer(comm, columns(2), squares, "sum").fit(data(), batch_size=SAMPLES, iterations=1)

    world(body)


@pytest.mark.ranks(2)
def test_a_term_that_begins_late_is_found_too(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        passes = 0

        def late(model: Any) -> torch.Tensor:
            nonlocal passes
            passes += 1
            return squares(model) if passes > 20 else torch.zeros((), dtype=torch.float64)

        run = trainer(comm, one_column(2), late, "mean")
        with pytest.raises(InputError, match="the Trainer would tell a wrong loss"):
            run.fit(data(), batch_size=SAMPLES, iterations=70)
        assert 20 < run.iteration <= 51
        comm.barrier()

    world(body)


class Scaled(nn.Module):
    """A parameter that the forward pass does not read."""

    @one_at_a_time
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("lay", [columns, one_column])
def test_what_samples_decide_is_told_of_by_all_ranks_before_the_next_step(world: World, lay: Any) -> None:
    def body(comm: AbstractCommunicator) -> None:
        x, y = data()
        model = tiled(Scaled().double(), comm, layout=lay(comm.size), batch_size=SAMPLES, reduction="mean")
        (scale,) = (each for name, each in model.module.named_parameters() if name == "scale")

        def step() -> None:
            here_x, here_y = model.local(x, y)
            torch.autograd.backward(nn.functional.mse_loss(scale * model(here_x), here_y))

        step()
        if comm.size == 1 or lay is one_column:  # all have all samples
            step()
            return
        with pytest.raises(InputError, match=r"reads scale beside the network.* and its gradient from there differs"):
            step()
        comm.barrier()

    world(body)


@pytest.mark.ranks(2)
@pytest.mark.threads_only
@pytest.mark.parametrize("terms", [False, True])
def test_a_loop_of_ones_own_is_warned_once_and_only_of_such_terms(world: World, terms: bool) -> None:
    def body(comm: AbstractCommunicator) -> None:
        x, y = data()
        model = tiled(network(), comm, layout=one_column(2), batch_size=SAMPLES, reduction="mean")
        for number in range(12):
            here_x, here_y = model.local(x, y)
            loss = nn.functional.mse_loss(model(here_x), here_y)
            if number % 3 == 1:  # two forward passes before one backward pass
                loss = loss + model(here_x).square().mean()
            torch.autograd.backward(loss + (0.1 * squares(model) if terms else 0.0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world(body)
    told = [str(each.message) for each in caught if "beside the network" in str(each.message)]
    assert len(told) == int(terms)
    assert all("the gradient of a sum over elements (weight.square().sum()) is exact" in each for each in told)
