"""Is a loss what ranks can compute of parts of a batch? Looked at by computing it of parts, before anyone trains with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tatami.batch import cut_batch
from tatami.comm.agreement import all_or_none
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.partition.tracing.mixing import Judged, outputs_to_judge, refuse_other_loss
from tatami.partition.tracing.restore_state import kept
from tatami.random_state import kept_torch_state
from tatami.runtime.losses import LossReduction
from tatami.tiling import Span


def check_loss(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    here: tuple[Any, ...],
    *,
    network: nn.Module,
    samples: int,
    is_judged: bool,
    reduction: LossReduction,
    comm: AbstractCommunicator,
    what: str,
) -> None:
    """Refuse a loss that is not the mean, or the sum, of what samples give one by one. Collective.

    Args:
        model: what the loss calls; while it is looked at, its outputs are leaves of the graph, whose gradients are compared.
        loss: of samples that are given as `here` is; returns a scalar.
        here: this rank's samples.
        network: in `model`; it runs in evaluation, and its weights, buffers and modes are kept.
        samples: how many are in `here`.
        is_judged: whether this batch can show it; the same on all ranks. Otherwise the loss is computed, and not compared.
        reduction: what the loss does with the samples.
        comm: all ranks.
        what: the name of the loss, for errors.

    Raises:
        InputError: on all ranks: it is not, or the network couples samples of this batch.
    """
    modes = {module: module.training for module in network.modules()}
    leaves: list[torch.Tensor] = []
    forward = type(model).forward

    def judged(*inputs: Any, **named_inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(model, *inputs, **named_inputs)
        with torch.no_grad():
            output, found = outputs_to_judge(forward(model, *inputs, **named_inputs))
        leaves.extend(found)
        return output

    def of(span: Span) -> Judged:
        leaves.clear()
        with kept(network), kept_torch_state():
            network.eval()
            return loss(*(cut_batch(each, span, samples=samples) for each in here)), tuple(leaves)

    def look() -> None:
        refuse_other_loss(of, samples=samples if is_judged else 0, reduction=reduction, what=what)

    model.__dict__["forward"] = judged
    try:
        all_or_none(comm, look, what="the loss is not what ranks can compute of parts of a batch:", error=InputError)
    finally:
        del model.__dict__["forward"]
        for module, mode in modes.items():
            module.training = mode
