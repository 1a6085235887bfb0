"""Gradients of inputs before those of weights, so that the stage in front can go on.

The backward pass of a linear layer has two products: the gradient of its input, for which the layer in front waits, and that of
its weight, for which nothing waits until the update. Autograd computes both in one node. Here they are two, and the second one
comes later: autograd runs those nodes that are ready in the opposite order of their making, and the nodes of the weights are
made first of all, when the forward pass begins. So a stage hands the gradient of what it received back before it computes its
weights' gradients. With p stages, a micro-batch comes back through p - 1 of them, and through each in half the time.

    forward pass begins      _Weights.apply(weight, bias) -> token, one for each layer
    layer(x)                 _Linear.apply(x, token)      -> x @ weight.T + bias
    backward                 _Linear    gives the gradient of x, and leaves x and the gradient of the result in `_Products`
    when all is handed back  _Weights   makes the weight's gradient of them

The gradient arrives at the parameter as ever, in the same backward pass, and hooks see it there. From the second micro-batch
on there is a gradient of earlier ones, to which the product of a weight is added as it is computed (`Accumulated`), and nothing
arrives: weights are large and micro-batches small, so that to write a product, read it and add it up would take as long as to
compute it. That is why the first stage, which hands nothing back, has these layers as well; it computes both products at once.

Such products need not be computed in their backward pass at all. Those of some micro-batches are left (`LeftProducts`) for when
the stage would wait for another one, and for the end of the iteration, while the last gradients travel to the first stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

Accumulated = Callable[[nn.Parameter], tuple[torch.Tensor, float] | None]
"""Where the gradient of a weight may be added, and by which factor; see `tatami.gradients.engine`."""


class LeftProducts:
    """Products of weights that are left for later, of all micro-batches of an iteration.

    Args:
        micro_batches: of so many they may be left; the oldest of a layer are computed when there is another one. 0: none is.
    """

    def __init__(self, micro_batches: int = 0) -> None:
        self._most = micro_batches
        self._left: dict[int, deque[_Left]] = {}

    def add(self, total: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor, *, factor: float) -> None:
        """`factor` times the product of `grads` and `rows`, of shapes (n, outputs) and (n, inputs), belongs to `total`."""
        left = self._left.setdefault(id(total), deque())
        left.append((total, rows, grads, factor))
        while len(left) > self._most:
            _add(*left.popleft())

    def compute_one(self) -> bool:
        """Compute one product; False where none is left."""
        for left in self._left.values():
            if left:
                _add(*left.popleft())
                return True
        return False

    def compute_all(self) -> None:
        """At the end of the iteration."""
        while self.compute_one():
            pass
        self._left.clear()

    def clear(self) -> None:
        """An iteration begins again: forget what is left."""
        self._left.clear()


_Left = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]


@torch.no_grad()
def _add(total: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor, factor: float) -> None:
    total.addmm_(grads.t(), rows, alpha=factor)


class LateWeights:
    """The linear layers of one stage in one forward pass.

    Args:
        layers: whose weights are trained here, each once.
        accumulated: where their gradients of earlier micro-batches are.
        are_late: whether another stage waits for the gradient of what this one received.
        left: takes the products that are added to gradients of earlier micro-batches.
    """

    def __init__(self, layers: list[nn.Linear], *, accumulated: Accumulated, are_late: bool, left: LeftProducts) -> None:
        self._tokens: dict[int, tuple[torch.Tensor, _Products, list[Any]]] = {}
        for layer in layers:
            if layer.weight.requires_grad and layer.weight.is_leaf:
                products = _Products(layer, accumulated, are_late=are_late, left=left)
                token: torch.Tensor = _Weights.apply(products, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
                self._tokens[id(layer)] = token, products, [layer.weight, layer.bias]

    def call(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """What the layer computes."""
        found = self._tokens.get(id(layer))
        # Ranks that share units give a layer other tensors in place of its weights, whose gradients they sum.
        is_own = found is not None and all(a is b for a, b in zip((layer.weight, layer.bias), found[2], strict=True))
        if found is None or not is_own or torch.is_autocast_enabled(x.device.type) or not torch.is_grad_enabled():
            return functional.linear(x, layer.weight, layer.bias)
        token, products, _ = found
        out: torch.Tensor = _Linear.apply(x, token, products, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return out


class _Products:
    """Computes the gradients of one layer in one backward pass: into `.grad` where it may, else into `weight` and `bias`."""

    def __init__(self, layer: nn.Linear, accumulated: Accumulated, *, are_late: bool, left: LeftProducts) -> None:
        assert isinstance(layer.weight, nn.Parameter)
        self._parameter, self._accumulated, self._are_late = layer.weight, accumulated, are_late
        self._has_bias = layer.bias is not None and layer.bias.requires_grad
        self._for_later = left
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def add(self, x: torch.Tensor, grad: torch.Tensor) -> None:
        """The layer was given `x`, and the gradient of its result is `grad`."""
        self._left.append((x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])))
        if not self._are_late:
            self.compute()

    def compute(self) -> None:
        """Compute all products that are left."""
        for rows, grads in self._left:
            if (found := self._accumulated(self._parameter)) is not None:
                total, factor = found
                self._for_later.add(total, rows, grads, factor=factor)
            else:
                self.weight = grads.t().mm(rows) if self.weight is None else self.weight.addmm_(grads.t(), rows)
            if self._has_bias:
                self.bias = grads.sum(0) if self.bias is None else self.bias.add_(grads.sum(0))
        self._left.clear()


class _Weights(torch.autograd.Function):
    """From weight and bias to a token, whose gradient says that there is something to compute."""

    @staticmethod
    def forward(ctx: Any, products: _Products, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG004
        ctx.products = products
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
        products: _Products = ctx.products
        products.compute()
        weight, bias = products.weight, products.bias
        products.weight = products.bias = None
        return None, weight, bias


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass leaves the weight's gradient for later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token: torch.Tensor,  # noqa: ARG004 -- leads to `_Weights`
        products: _Products,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.products = products
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        ctx.products.add(x, grad)
        return grad.matmul(weight) if ctx.needs_input_grad[0] else None, grad.new_zeros(()), None, None, None
