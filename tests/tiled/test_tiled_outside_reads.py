"""Terms of a loss that read weights outside of the network: right, or refused where ranks share units or losses are sums."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from equal_runs import plain_fit
from torch import nn

from drawing import one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.parallel import DataParallel
from tatami.testing.worlds import World
from tatami.tiling import Layout
from tatami.train import Trainer, move
from tiled_rig import simple_layout, tiled

pytestmark = pytest.mark.ranks(2)

SAMPLES = 8
SGD = partial(torch.optim.SGD, lr=0.01)


@one_at_a_time
def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return x, y


def one_replica(size: int) -> Layout:
    return simple_layout(range(size))


def replicas(size: int) -> Layout:
    return simple_layout(*([rank] for rank in range(size)))


def squares(model: Any) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        total = total + parameter.square().sum()
    return total


def trainer(comm: AbstractCommunicator, layout: Layout, term: Callable[[Any], torch.Tensor], reduction: Any) -> Trainer:
    def step(model: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y, reduction=reduction) + 0.1 * term(model)

    model = tiled(network(), comm, layout=layout, batch_size=SAMPLES, reduction=reduction)
    return Trainer(model, optimizer=SGD, training_step=step, reduction=reduction)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("term", "told"),
    [
        (squares, r"reads 0\.weight outside of .* the loss of the Trainer would be wrong"),
        (lambda model: next(model.parameters()).norm(), r"reads 0\.weight outside of .* the gradient of a norm"),
    ],
)
def test_the_trainer_refuses_a_term_of_weights_that_ranks_share(comm: AbstractCommunicator, term: Any, told: str) -> None:
    run = trainer(comm, one_replica(comm.size), term, "mean")
    with pytest.raises(InputError, match=told):
        run.fit(data(), batch_size=SAMPLES, iterations=3)
    comm.barrier()  # the ranks are still in step


@pytest.mark.ranks(1, 2, 3)
def test_where_each_rank_has_all_weights_a_term_of_them_is_exact(comm: AbstractCommunicator) -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1]) + 0.1 * squares(model)

    expected, _ = plain_fit(network(), [data()] * 3, loss=loss, optimizer=SGD)
    run = trainer(comm, replicas(comm.size), squares, "mean")
    assert run.fit(data(), batch_size=SAMPLES, iterations=3, shuffle=False).losses == pytest.approx(expected, rel=1e-12)
    if comm.size > 1:
        move(run.model, one_replica(comm.size), optimizer=run.optimizer)
        with pytest.raises(InputError, match="the loss of the Trainer would be wrong"):
            run.fit(data(), batch_size=SAMPLES, iterations=1)


def test_a_sum_over_samples_would_count_the_term_once_for_each_replica(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match=r"\(training_step\) is said to be the sum over the samples of a batch, and is not"):
        trainer(comm, replicas(2), squares, "sum").fit(data(), batch_size=SAMPLES, iterations=1)


def test_a_term_that_begins_late_is_found_too(comm: AbstractCommunicator) -> None:
    passes = 0

    def late(model: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return squares(model) if passes > 20 else torch.zeros((), dtype=torch.float64)

    run = trainer(comm, one_replica(2), late, "mean")
    with pytest.raises(InputError, match="the loss of the Trainer would be wrong"):
        run.fit(data(), batch_size=SAMPLES, iterations=70)
    assert 20 < run.iteration <= 51
    comm.barrier()


@pytest.mark.threads_only
@pytest.mark.parametrize("terms", [False, True])
def test_a_loop_of_ones_own_is_warned_once_and_only_of_such_terms(world: World, terms: bool) -> None:
    def body(comm: AbstractCommunicator) -> None:
        x, y = data()
        model = tiled(network(), comm, layout=one_replica(2), batch_size=SAMPLES, reduction="mean")
        for number in range(12):
            here_x, here_y = model.local(x, y)
            loss = nn.functional.mse_loss(model(here_x), here_y)
            if number % 3 == 1:  # two forward passes before one backward pass
                loss = loss + model(here_x).square().mean()
            torch.autograd.backward(loss + (0.1 * squares(model) if terms else 0.0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world(body)
    told = [str(each.message) for each in caught if "outside of the network" in str(each.message)]
    assert len(told) == int(terms)
    assert all("the gradient of a sum over elements is exact" in each for each in told)


@pytest.mark.ranks(2, 3)
def test_a_loss_is_judged_by_the_model_that_made_its_outputs(comm: AbstractCommunicator) -> None:
    """The norm of a batch is refused where ranks see parts of it, but not by another model that is alive as well."""
    x, _ = data()
    other = tiled(network(), comm, layout=replicas(comm.size), batch_size=SAMPLES, reduction="mean")
    other(other.local(x)).square().mean().backward()
    with pytest.raises(InputError, match="the loss takes"):
        other(other.local(x)).square().mean().sqrt().backward()
    model, plain = DataParallel(network(), comm), network()
    model(x).square().mean().sqrt().backward()
    torch.autograd.backward(plain(x).square().mean().sqrt())
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("samples", [2, 3])
def test_a_rank_with_a_single_sample_refuses_no_mean(comm: AbstractCommunicator, samples: int) -> None:
    """What a sample gives alone, and what a batch gives, have the same form there."""
    x, _ = data()
    model, plain = tiled(network(1), comm, layout=replicas(2), batch_size=samples, reduction="mean"), network(1)
    torch.autograd.backward(nn.functional.softplus(-plain(x[:samples])).mean())
    torch.autograd.backward(nn.functional.softplus(-model(model.local(x[:samples]))).mean())
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, rtol=1e-12, atol=1e-14)
