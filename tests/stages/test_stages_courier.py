"""Tensors of one kind arrive in the order in which they were sent, whenever they come."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tatami.stages.courier import Courier
from tatami.stages.late_weights import LateWeights, LeftProducts

TAG = 3
FIRST, SECOND = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])


class Request:
    """A receive; its message is one that was sent before it was posted, and may come while others are looked at."""

    def __init__(self, come: Callable[[], bool]) -> None:
        self._come = come

    def test(self) -> bool:
        return self._come()


class Network:
    """Hands messages of a tag to the receives of this tag in their order; message n has come at look `comes[n]`."""

    rank, timeout_s, device = 0, 1.0, None

    def __init__(self, comes: tuple[int, ...]) -> None:
        self.looks = 0
        self._comes = comes
        self._posted: dict[int, int] = {}

    def irecv(self, out: torch.Tensor, source: int, *, tag: int) -> Request:  # noqa: ARG002
        place = self._posted.get(tag, 0)
        self._posted[tag] = place + 1
        is_header = tag % 2 == 0

        def come() -> bool:
            self.looks += 1
            if self.looks <= self._comes[2 * place + (not is_header)]:
                return False
            tensor = (FIRST, SECOND)[place]
            out.copy_(torch.tensor([1, 1, 2, *[0] * 8]) if is_header else tensor)
            return True

        return Request(come)


def test_a_tensor_that_comes_during_a_look_is_not_taken_for_the_one_before_it() -> None:
    for comes in itertools.product(range(4), repeat=4):
        network: Any = Network(comes)
        courier = Courier(network)
        courier._wake = lambda: None  # type: ignore[method-assign]  # this test looks, not a thread
        arrivals = [courier.expect(1, tag=TAG) for _ in range(2)]
        for _ in range(20):
            courier._look()
        for arrival, tensor in zip(arrivals, (FIRST, SECOND), strict=True):
            assert arrival.tensor is not None
            assert torch.equal(arrival.tensor, tensor), comes


def _room(room: tuple[torch.Tensor, float] | None, _: nn.Parameter) -> tuple[torch.Tensor, float] | None:
    return room


@pytest.mark.parametrize("are_late", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("most", [0, 1])
def test_a_product_is_added_where_earlier_micro_batches_left_theirs(most: int, has_bias: bool, are_late: bool) -> None:
    layer = nn.Linear(3, 4, bias=has_bias, dtype=torch.float64)
    first, second = torch.randn(2, 5, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = LeftProducts(most)
    expected = torch.autograd.grad((layer(first) ** 2).sum() + 0.5 * (layer(second) ** 2).sum(), layer.weight)[0]
    for x, factor in ((first, 1.0), (second, 0.5)):
        earlier = layer.weight.grad
        room = None if earlier is None else (earlier, factor)
        found = LateWeights([layer], accumulated=partial(_room, room), are_late=are_late, left=left)
        torch.autograd.backward((found.call(layer, x.requires_grad_()) ** 2).sum())
        assert earlier is None or layer.weight.grad is earlier  # nothing came beside what was added
    assert left.compute_one() == bool(most)
    assert not left.compute_one()
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)
    if has_bias:  # as ever
        bias = sum(torch.autograd.grad((layer(x) ** 2).sum(), layer.bias)[0] for x in (first, second))
        torch.testing.assert_close(layer.bias.grad, bias, rtol=1e-12, atol=1e-12)


def test_the_oldest_products_are_computed_when_too_many_are_left_and_forgotten_ones_never() -> None:
    left, total = LeftProducts(2), torch.zeros(2, 3)
    for factor in (1.0, 10.0, 100.0):
        left.add(total, torch.eye(3), torch.ones(3, 2), factor=factor)
    assert total.flatten().tolist() == [1.0] * 6
    left.clear()
    left.compute_all()
    assert total.flatten().tolist() == [1.0] * 6
