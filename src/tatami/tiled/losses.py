"""What a loss does with the samples of a batch: the sum or the mean, on which the gradient of the global batch depends.

The mean over the samples of a rank is weighed by their share of the batch before ranks add up their gradients, a sum is not. So
a wrong guess gives gradients that are wrong, without an error. Nothing is guessed: a loss tells, or its user does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from tatami.errors import InputError

Loss = Callable[[Any, Any], torch.Tensor]
"""(output, target) -> the mean or the sum over samples."""
LossReduction = Literal["mean", "sum"]

IGNORED = -100
"""What torch's losses leave out unless they are told otherwise."""
_CLASS_WEIGHTS = (nn.NLLLoss, nn.CrossEntropyLoss, F.nll_loss, F.cross_entropy)


def check_targets_count(tensors: Iterable[torch.Tensor]) -> None:
    """For a loop written by hand, whose loss is not seen: its mean is divided by the targets that a rank counts itself.

    Raises:
        InputError: integers among `tensors`, of the global batch, hold the number of targets that losses leave out.
    """
    if any(not tensor.is_floating_point() and bool((tensor == IGNORED).any()) for tensor in tensors):
        raise InputError(
            f"the batch holds {IGNORED}, which losses leave out: the means of ranks that leave out different numbers of them "
            "do not make up the global one. Take the sum over targets, divide it by how many count in the global batch, "
            "and tile with reduction='sum'; or train with the Trainer, which counts them"
        )


def check_reduction(reduction: object) -> None:
    """
    Raises:
        InputError: `reduction` is neither "mean" nor "sum".
    """
    if reduction not in get_args(LossReduction):
        raise InputError(f"reduction must be 'mean' or 'sum', as the loss function's own, not {reduction!r}")


def reduction_of(loss: Loss, *, given: LossReduction | None, otherwise: LossReduction | None) -> LossReduction:
    """What `loss` does with samples.

    Args:
        loss: tells by its attribute `reduction`, as torch's losses do, by a keyword that `functools.partial` has bound, or by
            the default of its parameter `reduction`, which it is called without.
        given: what the user says of it.
        otherwise: for a loss of which neither tells.

    Raises:
        InputError: nothing tells; the loss and its user contradict each other; or it takes a mean that is not over samples, so
            that the means of parts do not make up the mean of the whole.
    """
    if isinstance(loss, type):
        raise InputError(f"the loss is the class {loss.__name__}; give one of it: {loss.__name__}()")
    if given is not None:
        check_reduction(given)
    own = setting_of(loss, "reduction")
    old = [name for name in ("size_average", "reduce") if setting_of(loss, name) is not None]
    if old:
        raise InputError(
            f"the loss {_name(loss)} is given torch's old {' and '.join(old)}; give reduction='mean' or 'sum' instead"
        )
    if own is None:
        own = given or otherwise
    if own is None:
        raise InputError(
            f"the loss {_name(loss)} does not tell whether it takes the mean or the sum over the samples of a batch. Give the "
            "Trainer reduction='mean' or reduction='sum'"
        )
    if own not in get_args(LossReduction):
        raise InputError(f"the loss must reduce to one number by 'mean' or 'sum', not by {own!r}")
    if given is not None and own != given:
        raise InputError(f"the loss {_name(loss)} reduces by {own!r}, but the Trainer was given reduction={given!r}")
    function = _function(loss)
    divides = function in _CLASS_WEIGHTS or isinstance(function, _CLASS_WEIGHTS[:2])
    if own == "mean" and divides and setting_of(loss, "weight") is not None:
        raise InputError(
            f"{_name(loss)} with class weights divides by the weights of the samples "
            "that a rank sees, so the ranks' means do not make up the global one. Use reduction='sum'"
        )
    return "mean" if own == "mean" else "sum"


def setting_of(loss: Loss, name: str) -> Any:
    """The setting `name` of a loss; None where it has none, or does not tell."""
    if isinstance(loss, functools.partial):
        return loss.keywords[name] if name in loss.keywords else setting_of(loss.func, name)
    if hasattr(loss, name):
        return getattr(loss, name)
    if not inspect.isroutine(loss):
        return None
    try:
        parameter = inspect.signature(loss).parameters.get(name)
    except (TypeError, ValueError):  # a function that is not written in Python
        return None
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def _function(loss: Loss) -> Any:
    return loss.func if isinstance(loss, functools.partial) else loss


def _name(loss: Loss) -> str:
    return str(getattr(_function(loss), "__name__", type(_function(loss)).__name__))
