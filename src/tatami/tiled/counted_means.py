"""Means over targets of which some are left out (`ignore_index`): no rank knows by how many targets the others divide.

So a rank takes its mean over all of its targets, those that are left out counting as 0. The ranks tell each other, with their
losses, how many these were; what the mean over all of them is too small by is known before the gradients are used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tatami.errors import InputError
from tatami.tiled.losses import IGNORED

_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class CountedMeans(TorchFunctionMode):
    """Takes the means of cross-entropies, wherever they are taken inside of it, over all targets."""

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
