"""A loss whose reduction is not known is refused before a gradient could be wrong; one that tells is taken at its word."""

import functools
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import SAMPLES, check_fit, plain_fit
from torch import nn

from drawing import mlp
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.runtime.losses import reduction_of, setting_of
from tatami.testing.worlds import World
from tatami.train import History, TiledModel, Trainer
from tiled_rig import assert_close, gradients, some_layouts, tiled, whole_gradients

SGD = functools.partial(torch.optim.SGD, lr=0.01)
network = partial(mlp, 4, 6, 3)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def tells_sum(output: torch.Tensor, target: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    return F.mse_loss(output, target, reduction=reduction)


class OwnLoss(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return summed(output, target)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.MSELoss(), "mean"),
        (nn.MSELoss(reduction="sum"), "sum"),
        (F.mse_loss, "mean"),
        (F.cross_entropy, "mean"),
        (functools.partial(F.cross_entropy, reduction="sum"), "sum"),
        (functools.partial(functools.partial(F.mse_loss, reduction="sum")), "sum"),
        (functools.partial(F.mse_loss), "mean"),
        (functools.partial(nn.L1Loss(reduction="sum")), "sum"),
        (tells_sum, "sum"),
        (functools.partial(tells_sum, reduction="mean"), "mean"),
    ],
)
def test_losses_that_tell(loss: Any, expected: str) -> None:
    assert reduction_of(loss, given=None, otherwise=None) == expected
    assert reduction_of(loss, given=None, otherwise="sum" if expected == "mean" else "mean") == expected
    with pytest.raises(InputError, match=f"reduces by '{expected}', but the Trainer was given"):
        reduction_of(loss, given="sum" if expected == "mean" else "mean", otherwise=None)


@pytest.mark.parametrize("loss", [summed, lambda x, y: (x - y).square().sum(), OwnLoss(), functools.partial(summed)])
def test_losses_that_do_not_tell(loss: Any) -> None:
    name = re.escape(getattr(getattr(loss, "func", loss), "__name__", "OwnLoss"))
    with pytest.raises(InputError, match=rf"the loss {name} does not tell whether.*Give the Trainer reduction='mean' or"):
        reduction_of(loss, given=None, otherwise=None)
    assert reduction_of(loss, given="sum", otherwise="mean") == "sum"
    assert reduction_of(loss, given=None, otherwise="mean") == "mean"


@pytest.mark.parametrize(
    ("loss", "given", "match"),
    [
        (functools.partial(F.mse_loss, size_average=False), None, "torch's old size_average; give reduction="),
        (functools.partial(F.mse_loss, reduce=False), None, "torch's old reduce; give reduction="),
        (nn.MSELoss(reduction="none"), None, "'mean' or 'sum', not by 'none'"),
        (summed, "total", "reduction must be 'mean' or 'sum', as the loss function's own, not 'total'"),
    ],
)
def test_losses_that_can_not_be(loss: Any, given: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        reduction_of(loss, given=given, otherwise="mean")


def test_the_targets_that_a_functional_loss_leaves_out_are_known() -> None:
    assert setting_of(F.cross_entropy, "ignore_index") == -100
    assert setting_of(functools.partial(F.cross_entropy, ignore_index=3), "ignore_index") == 3
    assert setting_of(F.mse_loss, "ignore_index") is None


@pytest.mark.parametrize("told", ["nothing", "trainer", "tile"])
def test_a_lambda_in_the_trainer(world: World, told: str) -> None:
    expected = plain_fit(network(), [batch()], loss=lambda model, batch: summed(model(batch[0]), batch[1]), optimizer=SGD)

    def fit(model: TiledModel, _: AbstractCommunicator) -> History:
        make = functools.partial(Trainer, model, optimizer=SGD, loss=lambda output, target: summed(output, target))
        if told == "nothing":
            with pytest.raises(InputError, match="the loss <lambda> does not tell"):
                make()
        history = make(reduction=None if told == "tile" else "sum").fit(batch(), batch_size=SAMPLES, iterations=1)
        assert model.reduction == "sum"
        return history

    check_fit(world, network(), expected, fit, reduction="sum" if told == "tile" else None)


@pytest.mark.parametrize("told", [None, "sum", "mean"])
def test_a_loop_written_by_hand_goes_backward_only_where_it_is_known(comm: AbstractCommunicator, told: str | None) -> None:
    plain, (x, y) = network(), batch()
    torch.autograd.backward(F.mse_loss(plain(x), y, reduction=told or "mean"))
    built = network()
    for layout in some_layouts(comm.size):
        model = tiled(built, comm, layout=layout, batch_size=SAMPLES, reduction=told)
        here_x, here_y = model.local(x, y)
        if told is None:
            with torch.no_grad():
                model(here_x)
            loss = F.mse_loss(model(here_x), here_y)
            with pytest.raises(InputError, match=r"does not know whether the loss.*Give tatami.tile reduction='mean' or"):
                torch.autograd.backward(loss)
            assert all(parameter.grad is None for parameter in model.parameters())
            model.reduction = "mean"
        torch.autograd.backward(F.mse_loss(model(here_x), here_y, reduction=told or "mean"))
        assert_close(whole_gradients(model), gradients(plain), what=f"gradients on {layout}")
        with pytest.raises(InputError, match="reduction must be 'mean' or 'sum'"):
            model.reduction = "none"  # type: ignore[assignment]


def variance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) + torch.relu(1 - output.std(0)).mean()


def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    del target
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = (target > 0).double()
    return ((output - target).square() * mask).sum() / mask.sum()


def penalized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) + 0.1 * output.abs().mean()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("loss", "reduction", "is_taken"),
    [
        (variance, "mean", False),
        (contrast, "mean", False),
        (masked, "mean", False),
        (summed, "mean", False),
        (penalized, "sum", False),
        (penalized, "mean", True),
        (summed, "sum", True),
    ],
)
def test_a_loss_of_ones_own_is_tried_on_the_first_batch(
    comm: AbstractCommunicator, loss: Any, reduction: Any, is_taken: bool
) -> None:
    trainer = Trainer(tiled(network(), comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES),
                      optimizer=SGD, loss=loss, reduction=reduction)  # fmt: skip
    if is_taken:
        assert trainer.fit(batch(), batch_size=SAMPLES, epochs=1).losses
        return
    with pytest.raises(InputError, match=f"is said to be the {reduction} over the samples of a batch, and is not"):
        trainer.fit(batch(), batch_size=SAMPLES, epochs=1)
