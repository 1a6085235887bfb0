"""What autograd sees of an exchange: a node whose tokens chain it to the one before and the one after."""

from __future__ import annotations

from typing import Any

import torch

_ZERO = torch.zeros((), dtype=torch.float32, device="cpu")
"""What tokens are copied from, faster than making new ones. Each has its own memory, because users may add to delegates."""


class _Exchanged(torch.autograd.Function):
    """What autograd sees of an exchange that has taken place: tokens chain it to the one before and the one after."""

    @staticmethod
    def forward(
        exchange: Any,
        token: torch.Tensor,  # noqa: ARG004 -- makes this exchange depend on the one before
        delegate: torch.Tensor | None,  # noqa: ARG004
        *tensors: torch.Tensor,  # noqa: ARG004
    ) -> tuple[torch.Tensor, ...]:
        return (_ZERO.clone(), *exchange.arrived)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.exchange = exchange = inputs[0]
        ctx.set_materialize_grads(False)
        if exchange.received and not all(each.content.wants_all for each in exchange.received):
            leaves = [leaf for each in exchange.received for leaf in each.content.leaves]
            constant = [tensor for tensor, leaf in zip(output[1:], leaves, strict=True) if not leaf.wants]
            ctx.mark_non_differentiable(*constant)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.exchange.gradients(grads[1:]))


# `Function.apply` inspects the signature of `forward` on every call, for 20 us, and then calls this.
apply: Any = super(torch.autograd.Function, _Exchanged).apply
