"""Gradients of weights that come late, or are added to those of earlier micro-batches."""

from functools import partial

import pytest
import torch
from torch import nn

from tatami.stages.late_weights import LateWeights


def _room(room: tuple[torch.Tensor, float] | None, _: nn.Parameter) -> tuple[torch.Tensor, float] | None:
    return room


@pytest.mark.parametrize("are_late", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_added_where_earlier_micro_batches_left_theirs(are_late: bool, has_bias: bool) -> None:
    layer = nn.Linear(3, 4, bias=has_bias, dtype=torch.float64)
    first, second = torch.randn(2, 5, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.autograd.grad((layer(first) ** 2).sum() + 0.5 * (layer(second) ** 2).sum(), layer.weight)[0]
    for x, factor in ((first, 1.0), (second, 0.5)):
        earlier = layer.weight.grad
        found = LateWeights(
            [layer],
            accumulated=partial(_room, None if earlier is None else (earlier, factor)),
            are_late=are_late,
        )
        torch.autograd.backward((found.call(layer, x.requires_grad_()) ** 2).sum())
        assert earlier is None or layer.weight.grad is earlier  # nothing came beside what was added
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)
    if has_bias:  # as ever
        bias = sum(torch.autograd.grad((layer(x) ** 2).sum(), layer.bias)[0] for x in (first, second))
        torch.testing.assert_close(layer.bias.grad, bias, rtol=1e-12, atol=1e-12)
