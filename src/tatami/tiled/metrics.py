"""Metrics of an evaluation, by name or as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tatami.errors import InputError

Metric = Callable[[Any, Any], float]
"""(output, target) of some samples -> a mean over these samples."""


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    """The share of targets that have the highest score: (samples, classes, ...) or (samples, ..., classes), as (samples, ...).

    Raises:
        InputError: shapes that do not belong together, or of which both axes could be the classes.
    """
    axes = [axis for axis in {1, output.dim() - 1} if axis > 0 and _without(output.shape, axis) == tuple(target.shape)]
    if len(axes) != 1:
        why = "either axis could be the classes" if axes else "no axis is one of classes"
        raise InputError(
            f"accuracy: the output is {tuple(output.shape)} and the target {tuple(target.shape)}, so that {why}; give a "
            "function of (output, target) as the metric"
        )
    return float((output.argmax(axes[0]) == target).double().mean())


def mean_squared_error(output: torch.Tensor, target: torch.Tensor) -> float:
    """Of outputs and targets of one shape."""
    return float((_alike(output, target) - target).double().square().mean())


def mean_absolute_error(output: torch.Tensor, target: torch.Tensor) -> float:
    """Of outputs and targets of one shape."""
    return float((_alike(output, target) - target).double().abs().mean())


METRICS: Mapping[str, Metric] = {
    "accuracy": accuracy,
    "mean_absolute_error": mean_absolute_error,
    "mean_squared_error": mean_squared_error,
}
"""Those that can be asked for by name."""


def metrics_of(given: Mapping[str, Metric] | Sequence[str] | None) -> dict[str, Metric]:
    """Name -> function.

    Raises:
        InputError: a name that is not known here.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    unknown = [name for name in ([given] if isinstance(given, str) else given) if name not in METRICS]
    if isinstance(given, str) or unknown:
        raise InputError(
            f"metrics {given!r}: give a list of names among {', '.join(METRICS)}, or a dict of name -> function of (output, "
            "target) that gives a mean over samples"
        )
    return {name: METRICS[name] for name in given}


def _without(shape: torch.Size, axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _alike(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.shape != target.shape:
        raise InputError(f"the output is {tuple(output.shape)} and the target {tuple(target.shape)}; they must be alike")
    return output
