"""Gradients of weights that come late, or are added to those of earlier micro-batches."""

from functools import partial

import pytest
import torch
from torch import nn

from tatami.stages.late_weights import LateWeights, LeftProducts


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
