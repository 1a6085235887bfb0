"""Optimizers that look at more than one element at a time are found by trying them, whatever they are called."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tatami.comm import AbstractCommunicator
from tatami.errors import ModelError
from tatami.runtime.optimizers import check_optimizer
from tatami.train import Trainer, tile

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


class Own(torch.optim.Optimizer):
    """A user's: each parameter goes against what `direction` makes of its gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()  # as Lion's

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * self.direction(parameter.grad)


class ByNorm(Own):
    """As LARS: the step depends on the norm of the whole weight's gradient."""

    def direction(self, grad: torch.Tensor) -> Any:
        return grad / grad.norm()


class ByRow(Own):
    def direction(self, grad: torch.Tensor) -> Any:
        return grad / grad.norm(dim=1, keepdim=True)


class Noisy(Own):
    """Every rank would draw noise of its own for what all ranks hold."""

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.randn_like(grad)


class WithClosure(Own):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        closure()


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 5))]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("settings", [{}, {"lr": 0.0}, {"foreach": True}, {"weight_decay": 0.1}, {"maximize": True}])
def test_those_of_torch_that_work_element_by_element_are_taken(name: str, settings: dict[str, Any]) -> None:
    kind = getattr(torch.optim, name)
    if name == "Rprop" and "weight_decay" in settings:
        settings = {}  # it has none
    check_optimizer(kind(weights(), **settings))


@pytest.mark.parametrize("kind", [Own, WithClosure])
def test_own_ones_are_taken_where_they_do_or_cannot_be_tried(kind: type[Own]) -> None:
    check_optimizer(kind(weights()))


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, ByNorm, ByRow, Noisy])
@pytest.mark.parametrize("lr", [0.0, 0.3])
def test_others_are_refused_whatever_they_are_called(kind: Any, lr: float) -> None:
    renamed = type("Renamed", (kind,), {})
    with pytest.raises(ModelError, match="Renamed does not work element by element"):
        check_optimizer(renamed(weights(), lr=lr))


def test_what_is_tried_draws_nothing_from_the_run() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with pytest.raises(ModelError, match="Noisy does not work element by element"):
        check_optimizer(Noisy(weights()))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.threads_only
@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_hand", [False, True])
def test_they_are_refused_by_the_trainer_and_in_a_loop(comm: AbstractCommunicator, by_hand: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = tile(net, comm, batch_size=4, speeds="equal", reduction="mean", quiet=True)
    if not by_hand:
        with pytest.raises(ModelError, match="ByNorm does not work element by element"):
            Trainer(model, optimizer=ByNorm, loss=nn.MSELoss())
        return
    own, taken = ByNorm(model.parameters()), Own(model.parameters())
    x, y = model.local(torch.ones(4, 3), torch.zeros(4, 2))
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        with pytest.raises(ModelError, match="ByNorm does not work element by element"):
            own.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    taken.step()
    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
