"""Gradients of inputs before those of weights, so that the stage in front can go on.

The backward pass of a linear layer has two products: the gradient of its input, for which the layer in front waits, and that of
its weight, for which nothing waits until the update. Autograd computes both in one node. Here they are two, and the second one
comes later: autograd runs those nodes that are ready in the opposite order of their making, and the nodes of the weights are
made first of all, when the forward pass begins. So a stage hands the gradient of what it received back before it computes its
weights' gradients. With p stages, a micro-batch comes back through p - 1 of them, and through each in half the time.

    forward pass begins      _Weights.apply(weight, bias) -> token, one for each layer
    layer(x)                 _Linear.apply(x, token)      -> x @ weight.T + bias
    backward                 _Linear    gives the gradient of x, and leaves x and the gradient of the result in the layer's list
    when all is handed back  _Weights   makes the weight's gradient of the list

The gradient arrives at the parameter as ever, in the same backward pass, and hooks see it there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class LateWeights:
    """The linear layers of one stage in one forward pass.

    Args:
        layers: whose weights are trained here, each once.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._tokens: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], list[Any]]] = {}
        for layer in layers:
            if layer.weight.requires_grad and layer.weight.is_leaf:
                pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
                token: torch.Tensor = _Weights.apply(pairs, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
                self._tokens[id(layer)] = token, pairs, [layer.weight, layer.bias]

    def call(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """What the layer computes."""
        found = self._tokens.get(id(layer))
        # Ranks that share units give a layer other tensors in place of its weights, whose gradients they sum.
        is_own = found is not None and all(a is b for a, b in zip((layer.weight, layer.bias), found[2], strict=True))
        if found is None or not is_own or torch.is_autocast_enabled(x.device.type) or not torch.is_grad_enabled():
            return functional.linear(x, layer.weight, layer.bias)
        token, pairs, _ = found
        out: torch.Tensor = _Linear.apply(x, token, pairs, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return out


class _Weights(torch.autograd.Function):
    """From weight and bias to a token, whose gradient says that there is something in `pairs`."""

    @staticmethod
    def forward(
        ctx: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.pairs, ctx.has_bias = pairs, bias is not None and bias.requires_grad
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
        weight = bias = None
        while ctx.pairs:
            x, grad = ctx.pairs.pop(0)
            rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            weight = grads.t().mm(rows) if weight is None else weight.addmm_(grads.t(), rows)
            if ctx.has_bias:
                bias = grads.sum(0) if bias is None else bias.add_(grads.sum(0))
        return None, weight, bias


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass leaves the weight's gradient for later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token: torch.Tensor,  # noqa: ARG004 -- leads to `_Weights`
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pairs = pairs
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.pairs.append((x, grad))
        return grad.matmul(weight) if ctx.needs_input_grad[0] else None, grad.new_zeros(()), None, None, None
