"""Optimizers that look at a whole weight, of which a rank holds only a part, are refused; so are those of the plain network.

Which those are is tried: one of the same class and settings takes steps on a small weight, and others on its parts.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tatami.errors import InputError, ModelError
from tatami.random_state import kept_torch_state
from tatami.runtime.norms import models

_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS")
"""What cannot be tried, because it wants a closure, and what is known by its name."""
_STEPS = 4
_SAME = 1e-9
"""Tolerance, as a fraction of the largest change of an element; all is in double precision."""

_lock = threading.Lock()
_is_watching = False


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at a whole weight at once, of which a rank holds only a part.

    Raises:
        ModelError: the optimizer does not work element by element.
    """
    name = type(optimizer).__name__
    if name in _NOT_ELEMENTWISE or not _is_elementwise(optimizer):
        raise ModelError(
            f"{name} does not work element by element: it would take this rank's tile, or stage, for the whole. "
            "Use SGD, Adam, AdamW, RMSprop, Adagrad or another optimizer that does"
        )


def check_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step any part of a weight by itself, wherever it is cut, without its shape.

    Raises:
        ModelError: it does not work element by element, by its shape, or cannot be tried.
    """
    check_optimizer(optimizer)
    if optimizer not in _shardable:
        try:
            with kept_torch_state():
                _shardable[optimizer] = _parts_step_as_the_whole(optimizer, None)
        except Exception:  # it takes other arguments, or a closure
            _shardable[optimizer] = False
    if not _shardable[optimizer]:
        raise ModelError(
            f"sharded_optimizer=True cuts weights anywhere, and {type(optimizer).__name__} looks at their shape, or could not "
            "be tried on a small weight and its parts. Use SGD, Adam, AdamW or another that works element by element, or leave "
            "sharded_optimizer out"
        )


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer of other parameters: it would change nothing of this model.

    Raises:
        InputError: it has parameters that are not the model's.
    """
    own = {id(parameter) for parameter in model.parameters()}
    num_other = sum(id(each) not in own for group in optimizer.param_groups for each in group["params"])
    if num_other:
        raise InputError(
            f"the optimizer has {num_other} parameters that are not the tiled model's, which are new ones; make it from "
            "model.parameters() after model = tatami.tile(...), or give what makes it: partial(torch.optim.SGD, lr=0.5)"
        )


_tried: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
_shardable: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps on the parts of a weight, each part alone, are those on the whole; so it is where that cannot be tried."""
    found = _tried.get(optimizer)
    if found is None:
        try:
            with kept_torch_state():  # it may draw, and the run is to draw what it would without this
                found = all(_parts_step_as_the_whole(optimizer, dim) for dim in (0, 1))
        except Exception:  # it takes other arguments, or a closure; torch's own and most others can be tried
            found = True
        _tried[optimizer] = found
    return found


def _parts_step_as_the_whole(optimizer: torch.optim.Optimizer, dim: int | None) -> bool:
    """For a weight that is cut across dimension `dim`; None: anywhere, as a row of elements."""
    generator = torch.Generator().manual_seed(0)
    weight, *grads = (torch.randn(6, 4, dtype=torch.float64, generator=generator, device="cpu") for _ in range(1 + _STEPS))
    whole = _stepped(optimizer, weight, grads)
    if dim is None:
        whole, weight, *grads = (tensor.view(-1) for tensor in (whole, weight, *grads))
    axis = dim or 0
    sizes = [weight.shape[axis] // 2 - 1, weight.shape[axis] // 2 + 1]
    cut = [torch.split(tensor, sizes, axis) for tensor in (weight, *grads)]
    parts = torch.cat([_stepped(optimizer, part, of_part) for part, *of_part in zip(*cut, strict=True)], axis)
    return float((parts - whole).abs().max()) <= _SAME * float((whole - weight).abs().max())


def _stepped(optimizer: torch.optim.Optimizer, weight: torch.Tensor, grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """`weight` after a step for each gradient, by an optimizer of the same class and settings."""
    known = inspect.signature(type(optimizer).__init__).parameters
    given = {name: value for name, value in optimizer.defaults.items() if name in known}
    if given.get("capturable"):  # of devices only
        given["capturable"] = False
    parameter = nn.Parameter(weight.clone())
    alike = type(optimizer)([parameter], **given)
    for group in alike.param_groups:
        if group.get("lr") == 0:  # of a schedule that warms up
            group["lr"] = 1e-2
    for grad in grads:
        parameter.grad = grad.clone()
        alike.step()
    return parameter.detach()


def watch_optimizers() -> None:
    """From now on, check optimizers of tiled parameters in their steps: a loop written by hand shows them to nothing else."""
    global _is_watching
    with _lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_check_step)
            _is_watching = True


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 -- a hook of torch's
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(parameter.grad is None for parameter in stepped):
        plain = {id(parameter) for model in models() for parameter in model.plain_parameters()}
        if any(id(parameter) in plain for parameter in stepped):
            raise InputError(
                "this optimizer's step changes nothing: its parameters are those of the network that tatami.tile was given, "
                "and have no gradients. The tiled model's are new ones: make the optimizer from model.parameters() after "
                "model = tatami.tile(...)"
            )
    if optimizer not in _tried or not _tried[optimizer] or type(optimizer).__name__ in _NOT_ELEMENTWISE:
        tiled = {id(parameter) for model in models() for parameter in model.tiled_parameters()}
        if any(id(parameter) in tiled for parameter in stepped):
            check_optimizer(optimizer)
