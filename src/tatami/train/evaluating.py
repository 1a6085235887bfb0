"""What a tiled model makes of data: its loss, metrics, and outputs over all samples, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tatami.batch import samples_of
from tatami.errors import InputError
from tatami.model.model import TiledModel
from tatami.runtime.losses import CountedMeans
from tatami.runtime.precision import Precision, autocast
from tatami.train.batches import AbstractBatches
from tatami.train.objective import Objective


def evaluate(
    model: TiledModel,
    batches: AbstractBatches,
    objective: Objective,
    *,
    metrics: Mapping[str, Metric],
    precision: Precision | None,
) -> dict[str, float]:
    """The loss under "loss", and the metrics, each a mean over all samples. Collective.

    Raises:
        InputError: the ranks were given different data; or metrics where nothing but the loss is known.
    """
    if metrics and objective.training_step is not None:
        raise InputError("metrics are of outputs, which a training_step keeps to itself; give the Trainer a loss instead")
    _begin(model, batches)
    sums = torch.zeros(2 + len(metrics), dtype=torch.float64, device="cpu")
    samples = 0
    with _looking(model, precision):
        for portion in batches.epoch(0, model, agree=True):
            batch, here = portion.here, samples_of(portion.here)
            samples += portion.size
            counts = model.speaks_for_replica and here > 0
            output: Any = None
            loss: torch.Tensor | None = None
            counting = CountedMeans() if model.reduction == "mean" else None
            with counting or nullcontext():
                if objective.training_step is not None:
                    loss = objective(model, batch)
                else:
                    output = objective.run(model, batch)
                    loss = objective.judge(output, batch) if counts else None
            if not counts or loss is None:
                continue
            sums[0] += loss.item() * (here if counting is not None else 1)
            sums[1] += here * (1 - counting.left_out(loss)) if counting is not None else 0.0
            for index, metric in enumerate(metrics.values(), start=2):
                sums[index] += metric(output, objective.target_of(batch)) * here
    model.comm.allreduce(sums)
    loss_sum, counted, *rest = sums.tolist()
    means = {name: total / samples for name, total in zip(metrics, rest, strict=True)}
    mean = loss_sum / counted if counted else math.nan
    return {"loss": mean if model.reduction == "mean" else loss_sum, **means}


def predict(model: TiledModel, batches: AbstractBatches, objective: Objective, *, precision: Precision | None) -> Any:
    """The outputs for all samples, in order, on the CPU, in the structure that the network returns. Collective.

    Raises:
        InputError: the ranks were given different data.
    """
    _begin(model, batches)
    outputs = []
    structure: Any = None
    with _looking(model, precision):
        for portion in batches.epoch(0, model, agree=True):
            args, kwargs = objective.predicting(portion.here)
            leaves, structure = pytree.tree_flatten(model(*args, **kwargs))
            mine = [leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            told = model.comm.allgather_object((model.tile.replica, mine) if model.tile and model.speaks_for_replica else None)
            replicas = dict(each for each in told if each is not None)
            outputs.append([_joined([replicas[index][place] for index in sorted(replicas)]) for place in range(len(leaves))])
    whole = [_joined([parts[place] for parts in outputs]) for place in range(len(outputs[0]))]
    return pytree.tree_unflatten(whole, structure)


def _begin(model: TiledModel, batches: AbstractBatches) -> None:
    if model.comm.changes:
        batches.begin_again()
    batches.compare(model.comm)


@contextmanager
def _looking(model: TiledModel, precision: Precision | None) -> Iterator[None]:
    """Forward passes in evaluation, without gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(precision, next(model.parameters()).device):
            yield
    finally:
        model.train(was_training)


def _joined(parts: list[Any]) -> Any:
    """Outputs of several replicas or batches, joined; anything other than a tensor of samples is that of the first."""
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]


Metric = Callable[[Any, Any], float]
"""(output, target) of some samples -> a mean over these samples."""


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    """The share of targets that have the highest score: (samples, classes, ...) or (samples, ..., classes), as (samples, ...).

    Raises:
        InputError: shapes that do not belong together, or of which both axes could be the classes.
    """
    shape, wanted = tuple(output.shape), tuple(target.shape)
    axes = [axis for axis in {1, output.dim() - 1} if axis > 0 and shape[:axis] + shape[axis + 1 :] == wanted]
    if len(axes) != 1:
        why = "either axis could be the classes" if axes else "no axis is one of classes"
        raise InputError(
            f"accuracy: the output is {tuple(output.shape)} and the target {tuple(target.shape)}, so that {why}; give a "
            "function of (output, target) as the metric"
        )
    return float((output.argmax(axes[0]) == target).double().mean())


def mean_squared_error(output: torch.Tensor, target: torch.Tensor) -> float:
    """The error over all elements of outputs and targets of one shape."""
    return float((_alike(output, target) - target).double().square().mean())


def mean_absolute_error(output: torch.Tensor, target: torch.Tensor) -> float:
    """The error over all elements of outputs and targets of one shape."""
    return float((_alike(output, target) - target).double().abs().mean())


METRICS: Mapping[str, Metric] = {
    "accuracy": accuracy,
    "mean_absolute_error": mean_absolute_error,
    "mean_squared_error": mean_squared_error,
}
"""Metrics that can be asked for by name."""


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


def _alike(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.shape != target.shape:
        raise InputError(f"the output is {tuple(output.shape)} and the target {tuple(target.shape)}; they must be alike")
    return output
