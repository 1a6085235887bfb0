"""`torch.amp.GradScaler` on tiled models: whether a step is left out is decided on the gradients of all ranks.

A scaler leaves a step out where a gradient overflowed, and halves its scale. A rank sees the gradients of its own units only;
were it to decide alone, ranks would be steps apart, and their scales, too. So what each rank found is brought together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from tatami.comm.reduction import Op
from tatami.runtime.norms import models
from tatami.runtime.sharded_steps import shards_in_place

_UNSCALE = "_unscale_grads_"
_lock = threading.Lock()


def watch_scalers() -> None:
    """From now on, scalers decide alike on all ranks of a tiled model."""
    with _lock:
        unscale: Callable[..., Any] = getattr(GradScaler, _UNSCALE)
        if not hasattr(unscale, "decides_alike"):
            setattr(GradScaler, _UNSCALE, _deciding_alike(unscale))


def _deciding_alike(unscale: Callable[..., Any]) -> Callable[..., Any]:
    def decide(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with shards_in_place(optimizer):
            found: dict[torch.device, torch.Tensor] = unscale(scaler, optimizer, *args, **kwargs)
        comm = _comm_of(optimizer)
        if comm is not None:
            worst = torch.tensor(
                [max((float(each) for each in found.values()), default=0.0)], dtype=torch.float32, device="cpu"
            )
            comm.allreduce(worst, op=Op.MAX)
            if not found:  # no gradient is here, and the scaler wants to know
                found[torch.device("cpu")] = worst.view(()).clone()  # of the shape of torch's own, which it adds up
            for each in found.values():
                each.copy_(worst.view(each.shape))
        return found

    decide.decides_alike = True  # type: ignore[attr-defined]
    return decide


def _comm_of(optimizer: torch.optim.Optimizer) -> Any:
    """The ranks of the tiled model whose parameters an optimizer has; None where there are no others."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models():
        if isinstance(model, nn.Module) and any(id(parameter) in trained for parameter in model.parameters()):
            comm: Any = model.comm
            return comm if comm.size > 1 else None
    return None
