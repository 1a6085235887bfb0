"""Optimizers that look at a whole weight, of which a rank holds only a part, are refused; so are those of the plain network.

Which those are is tried: one of the same class and settings takes steps on some weights, and others on their parts.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tatami.errors import InputError, ModelError, warn
from tatami.random_state import kept_torch_state
from tatami.runtime.norms import models

_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS")
"""What cannot be tried, because it wants a closure, and what is known by its name."""
_STEPS = 4
_SHAPES = ((6, 4), (4, 6, 3, 2), (130, 130))
"""Shapes of the weights that it is tried on: a small one, one of a convolution, and a large one, because some optimizers look
at the whole of a weight only from 4,096 elements or 128 rows on, or where its norm exceeds a limit."""
_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"})
"""What schedules write into the groups of an optimizer, and some constructors refuse."""
_PATCHED = frozenset({"step", "_opt_called"})
"""What schedules write into an optimizer."""
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
    num_groups, found = _shardable.get(optimizer, (0, False))
    if num_groups != len(optimizer.param_groups):
        try:
            with kept_torch_state():
                found = _parts_step_as_the_whole(optimizer, None)
        except Exception:  # it takes other arguments, or a closure
            found = False
        _shardable[optimizer] = len(optimizer.param_groups), found
    if not found:
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


_tried: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
"""With so many groups, an optimizer works element by element, or does not."""
_shardable: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
_of_torch: dict[tuple[type, tuple[str, ...], int | None], bool] = {}
"""Results for torch's own classes, whose steps depend on the settings of their groups alone, and by which dimension is cut."""


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps on the parts of a weight, each part alone, are those on the whole; so it is where that cannot be tried."""
    num_groups, found = _tried.get(optimizer, (0, True))
    if num_groups != len(optimizer.param_groups):
        try:
            with kept_torch_state():  # it may draw, and the run is to draw what it would without this
                found = all(_parts_step_as_the_whole(optimizer, dim) for dim in (0, 1))
        except Exception as error:  # it takes other arguments, or a closure; torch's own and most others can be tried
            found = True
            warn(
                f"whether {type(optimizer).__name__} works element by element could not be tried on a small weight "
                f"({type(error).__name__}: {error}), and is assumed. If it looks at a whole weight (its norm, its rows), it is "
                "wrong wherever a rank has a part of that weight"
            )
        _tried[optimizer] = len(optimizer.param_groups), found
    return found


def _parts_step_as_the_whole(optimizer: torch.optim.Optimizer, dim: int | None) -> bool:
    """For weights that are cut across dimension `dim`; None: anywhere, as a row of elements."""
    groups = [
        {name: value for name, value in group.items() if name not in _OF_SCHEDULES and name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    # Groups with learning rates of their own, as those of layers, are tried once.
    tried = {repr({**settings, "lr": None}): settings for settings in groups}
    key = type(optimizer), tuple(tried), dim
    found = _of_torch.get(key)
    if found is None:
        found = all(_steps_in_parts(optimizer, settings, shape, dim) for settings in tried.values() for shape in _SHAPES)
        if type(optimizer).__module__.startswith("torch.optim."):
            _of_torch[key] = found
    return found


def _steps_in_parts(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], shape: tuple[int, ...], dim: int | None
) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, *grads = (torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu") for _ in range(1 + _STEPS))
    whole = _stepped(optimizer, settings, weight, grads)
    if dim is None:
        whole, weight, *grads = (tensor.view(-1) for tensor in (whole, weight, *grads))
    axis = dim or 0
    sizes = [weight.shape[axis] // 2 - 1, weight.shape[axis] // 2 + 1]
    cut = [torch.split(tensor, sizes, axis) for tensor in (weight, *grads)]
    parts = torch.cat([_stepped(optimizer, settings, part, of_part) for part, *of_part in zip(*cut, strict=True)], axis)
    return float((parts - whole).abs().max()) <= _SAME * float((whole - weight).abs().max())


def _stepped(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], weight: torch.Tensor, grads: Iterable[torch.Tensor]
) -> torch.Tensor:
    """`weight` after a step for each gradient, by an optimizer of the same class with the settings of one group."""
    parameter = nn.Parameter(weight.clone())
    twin = _twin(optimizer, {**copy.deepcopy(dict(settings)), "params": [parameter]})
    for group in twin.param_groups:
        if group.get("lr") == 0:  # of a schedule that warms up
            group["lr"] = 1e-2
    for grad in grads:
        parameter.grad = grad.clone()
        twin.step()
    return parameter.detach()


def _twin(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """One of the same class and settings, with one group: by its constructor, or by a copy of its attributes."""
    kind = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    given = {name: value for name, value in optimizer.defaults.items() if name in known}
    for each in (given, group):
        if each.get("capturable"):  # of devices only
            each["capturable"] = False
    for groups in ([dict(group)], group["params"]):
        try:
            return kind(groups, **given)
        except Exception:  # it takes other arguments, or parameters alone
            continue
    made = object.__new__(kind)
    torch.optim.Optimizer.__init__(made, [group], dict(optimizer.defaults))
    own = {name: value for name, value in vars(optimizer).items() if name not in vars(made) and name not in _PATCHED}
    for name, value in own.items():
        if not isinstance(value, bool | int | float | str | None):
            raise TypeError(f"its constructor takes more than parameters and its defaults, and {name} is not a number")
    vars(made).update(own)
    return made


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
    if _tried.get(optimizer) != (len(optimizer.param_groups), True) or type(optimizer).__name__ in _NOT_ELEMENTWISE:
        tiled = {
            id(parameter)
            for model in models()
            # What couples weights, as a norm of all, would see those of one stage.
            for parameter in (model.tiled_parameters() if getattr(model, "stage", None) is None else model.own_parameters())  # type: ignore[attr-defined]
        }
        if any(id(parameter) in tiled for parameter in stepped):
            check_optimizer(optimizer)
