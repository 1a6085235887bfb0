"""How much a forward pass computes, as blocks are counted: products, and `ELEMENT_FLOP` for each element elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from tatami.workload.block import ELEMENT_FLOP

aten = torch.ops.aten
_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu
"""torch's own counter knows the kernels of GPUs alone."""
_BY_ELEMENT = {aten.native_layer_norm, aten.native_batch_norm, aten._native_batch_norm_legit, aten._softmax, aten._log_softmax}
_TWO_OPERANDS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten._trilinear}
"""Products; what is added to them comes first, or has one axis."""


class PassFlop(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs inside of it, with its backward pass, in `flop`: a third of both together.

    That is what a product takes whose operands both require a gradient, as each of these is a product of the same size. With
    frozen weights, or data as inputs, there are fewer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = func._overloadpacket
        own = 0.0
        if operation is _ON_CPU:
            query, key, value = (tensor.shape for tensor in args[:3])
            own = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
        elif operation in flop_registry:
            own = flop_registry[operation](*args, **kwargs, out_val=result)
        elif operation is aten._trilinear:
            own = 2.0 * args[0].shape[0] * args[1].numel()  # of a bilinear layer: rows, and its weights
        elif operation is aten.mkldnn_rnn_layer:
            # An LSTM of one layer and direction: every row goes through the weights of its input and of its state.
            own = 2.0 * args[0].shape[0] * args[0].shape[1] * (args[1].numel() + args[2].numel())
        elif torch.Tag.pointwise in func.tags or operation in _BY_ELEMENT:
            first = result[0] if isinstance(result, (tuple, list)) else result
            own = ELEMENT_FLOP * first.numel() if isinstance(first, torch.Tensor) else 0.0
        if own:
            given = [each for each in args if isinstance(each, torch.Tensor)]
            gradients = 2 * any(each.requires_grad for each in given)
            if operation in _TWO_OPERANDS:
                gradients = sum(each.requires_grad for each in [each for each in given if each.dim() > 1][-2:])
            self.flop += own * (1 + gradients) / 3
        return result
