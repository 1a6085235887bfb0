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
from torch.overrides import TorchFunctionMode

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
    function = _function(loss)
    if own == "batchmean" and (function is F.kl_div or isinstance(function, nn.KLDivLoss)):
        own = "mean"  # over samples, of sums over classes
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


_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class CountedMeans(TorchFunctionMode):
    """Takes the means of cross-entropies, wherever they are taken inside of it, over all targets.

    Where some targets are left out (`ignore_index`), no rank knows by how many the others divide. So a rank takes its mean
    over all of its targets, those that are left out counting as 0. The ranks tell each other, with their losses, how many
    these were; what the mean over all of them is too small by is known before the gradients are used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taken: list[tuple[torch.Tensor, int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs if func in (F.cross_entropy, F.nll_loss) else {}
        if not given or given.get("reduction", "mean") != "mean" or given["target"].is_floating_point():
            return func(*args, **kwargs)
        if given.get("weight") is not None:
            raise InputError(
                f"{func.__name__} with class weights divides by the weights of the samples that a rank sees, so the ranks' "
                "means do not make up the global one. Use reduction='sum'"
            )
        target = given["target"]
        left_out = int((target == given.get("ignore_index", IGNORED)).sum())
        mean = func(**{**given, "reduction": "sum"}) / target.numel() if left_out else func(*args, **kwargs)
        self._taken.append((mean, left_out, target.numel()))
        return mean

    def left_out(self, loss: torch.Tensor) -> float:
        """The share of the targets of `loss` that were left out.

        Raises:
            InputError: some were, and the loss is not that mean itself but something made of it.
        """
        if not any(number for _, number, _ in self._taken):
            return 0.0
        place = loss.untyped_storage().data_ptr()
        for mean, number, total in self._taken:
            if mean.untyped_storage().data_ptr() == place:
                return number / total
        raise InputError(
            "the loss is made of a mean that leaves targets out (ignore_index), and of something else; the ranks' means do not "
            "make up the global one. Use reduction='sum', or let the loss be the cross-entropy alone"
        )
