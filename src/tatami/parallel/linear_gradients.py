"""Linear layers whose weight gradients are computed where they are wanted, instead of copied there.

Autograd makes the gradient of a weight in memory of its own choice. For networks of large linear layers, that memory and the
copy out of it cost as much as summing the gradients over the ranks. Here the product that is the gradient is written straight
into a place that its owner names when backward comes to it:

    with LinearGradients(places):          # places(weight): the tensor, or None: as autograd does it
        loss = criterion(model(x), y)
    loss.backward()                        # weight.grad is the place

Only what `torch.nn.functional.linear` computes in plain float tensors is done so; all else is left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Places = Callable[[nn.Parameter], torch.Tensor | None]
_LEAST_ELEMENTS = 64 * 1024
"""Of a weight: copying less is cheaper than a function of Python."""


class LinearGradients(TorchFunctionMode):
    """While it is entered, linear layers ask `places` for the place of their weight's gradient, once in each backward pass.

    `places` is called during backward, and only when the gradient is about to become `weight.grad`: not by
    `torch.autograd.grad`, nor where the graph of the gradient is wanted.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and not kwargs and _is_plain(*args[:2]):
            return _Linear.apply(*args[:2], args[2] if len(args) > 2 else None, self._places)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """`nn.functional.linear`: x (..., inputs), weight (outputs, inputs), bias (outputs,) or None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, places: Places) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places = places
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_weight = None
        if needs_weight:
            place = ctx.places(weight) if _becomes_grad(ctx) else None
            of_weight = rows.t() @ inputs if place is None else torch.mm(rows.t(), inputs, out=place.view(weight.shape))
        return grad @ weight if needs_x else None, of_weight, rows.sum(0) if needs_bias else None, None


def _is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this is a large trainable weight in a forward pass that nothing else watches.

    Checkpointing, for one, watches what is saved for backward, and computes it a second time without us.
    """
    internals: Any = torch._C
    return (
        isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and weight.numel() >= _LEAST_ELEMENTS
        and x.dtype == weight.dtype
        and x.ndim > 1
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not internals._are_functorch_transforms_active()
        and internals._autograd._top_saved_tensors_default_hooks(True) is None
    )


def _becomes_grad(node: Any) -> bool:
    """Whether the gradient of the weight that `node` gives will be added to `weight.grad` in this pass."""
    if torch.is_grad_enabled():
        return False
    internals: Any = torch._C
    accumulates = node.next_functions[1][0]
    try:
        return bool(internals._will_engine_execute_node(accumulates))
    except RuntimeError:  # torch.autograd.grad was asked for it
        return False
