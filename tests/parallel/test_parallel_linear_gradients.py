"""Weight gradients written where they are wanted: the same values, and never where somebody else would find them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tatami.comm import AbstractCommunicator
from tatami.parallel import DataParallel, linear_gradients
from tatami.parallel.buckets import BucketSet
from tatami.parallel.linear_gradients import LinearGradients
from tatami.testing.worlds import World


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_gradients, "_LEAST_ELEMENTS", 1)


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    made = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def assert_equal(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], *, tolerance: float = 0.0) -> None:
    """The gradients."""
    mine, theirs = [grad(each) for each in actual], [grad(each) for each in expected]
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


class Room:
    """A place for each weight; given once, and of another value than any gradient before."""

    def __init__(self, model: nn.Module) -> None:
        self.places = {weight: torch.full_like(weight, 7.0).detach() for weight in model.parameters()}
        self.given: list[int] = []

    def __call__(self, weight: nn.Parameter) -> torch.Tensor | None:
        if id(weight) in self.given:
            return None
        self.given.append(id(weight))
        return self.places[weight]

    def untouched(self) -> bool:
        return all(bool((place == 7.0).all()) for place in self.places.values())


@pytest.fixture
def model() -> nn.Sequential:
    return network()


@pytest.fixture
def room(model: nn.Sequential) -> Room:
    return Room(model)


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5), (0, 5)])
def test_gradients_are_in_their_places_to_the_last_bit(model: nn.Sequential, room: Room, shape: tuple[int, ...]) -> None:
    x, plain = batch(*shape).requires_grad_(), network()
    with LinearGradients(room):
        loss: Any = model(x).square().sum()
    loss.backward()
    other = x.detach().clone().requires_grad_()
    plain(other).square().sum().backward()
    assert_equal([x, *model.parameters()], [other, *plain.parameters()])
    first, _, last = model.parameters()
    assert room.given == [id(last), id(first)]
    assert [grad(each).data_ptr() for each in (last, first)] == [room.places[each].data_ptr() for each in (last, first)]


def test_a_weight_that_is_used_twice_has_the_sum(model: nn.Sequential, room: Room) -> None:
    x, plain = batch(6, 5), network()
    with LinearGradients(room):
        loss: Any = model(x).square().sum() + model(2 * x).sum()
    loss.backward()
    (plain(x).square().sum() + plain(2 * x).sum()).backward()
    assert_equal(model.parameters(), plain.parameters(), tolerance=1e-13)


def test_what_does_not_become_grad_is_left_to_autograd(model: nn.Sequential, room: Room) -> None:
    x, plain = batch(6, 5).requires_grad_(), network()
    with LinearGradients(room):
        loss = model(x).square().sum()
    mine = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    theirs = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    torch.testing.assert_close(mine, theirs, rtol=0.0, atol=0.0)
    torch.autograd.grad(loss, x)
    assert room.given == []
    assert room.untouched()


def test_gradients_of_gradients(model: nn.Sequential, room: Room) -> None:
    x, plain = batch(6, 5).requires_grad_(), network()
    for each in (model, plain):
        with LinearGradients(room) if each is model else nullcontext():
            (slope,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        penalty: Any = slope.square().sum()
        penalty.backward()
    assert_equal(model.parameters(), plain.parameters(), tolerance=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_left_to_autograd(model: nn.Sequential, room: Room, reentrant: bool) -> None:
    x, plain = batch(6, 5).requires_grad_(), network()
    with LinearGradients(room):
        loss: Any = checkpoint(model, x, use_reentrant=reentrant).square().sum()
    loss.backward()
    plain(x).square().sum().backward()
    assert_equal(model.parameters(), plain.parameters())
    assert room.untouched()


def test_others_ways_of_computing_are_left_to_them(model: nn.Sequential, room: Room) -> None:
    x = batch(6, 5).float()
    with LinearGradients(room), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.float()(x).dtype == torch.bfloat16
    weights = {name: each.detach() for name, each in model.named_parameters()}
    with LinearGradients(room):
        slopes: Any = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(weights)
    loss: Any = model(x).square().sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(slopes[name], parameter.grad)
    assert room.untouched()


def test_data_parallel_computes_them_in_its_buckets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    inner = BucketSet.place

    def place(self: BucketSet, index: int) -> torch.Tensor | None:
        found = inner(self, index)
        assert found is not None
        given.append(found.data_ptr())
        return found

    monkeypatch.setattr(BucketSet, "place", place)

    def body(comm: AbstractCommunicator) -> None:
        module, plain = network(), network()
        model = DataParallel(module, comm)
        first, _, last = module.parameters()
        x = batch(3 * comm.size, 5)
        for _ in range(2):
            for each, inputs in ((model, x[3 * comm.rank : 3 * comm.rank + 3]), (plain, x)):
                each.zero_grad()
                loss: Any = each(inputs).square().mean()
                loss.backward()
            assert {grad(first).data_ptr(), grad(last).data_ptr()} <= set(given)
            assert_equal(module.parameters(), plain.parameters(), tolerance=1e-12)
        model.close()

    world(body)
