"""What a tiled model makes of data: its loss, metrics, and outputs over all samples, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tatami.batch import samples_of
from tatami.comm.agreement import problems_of
from tatami.comm.base import AbstractCommunicator
from tatami.comm.refusals import known_to_all
from tatami.errors import CommError, InputError
from tatami.model.model import TiledModel
from tatami.runtime.losses import IGNORED, CountedMeans
from tatami.runtime.precision import Precision, autocast
from tatami.tiling import Span
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
        InputError: the ranks were given different data; metrics where nothing but the loss is known; or a metric that, on
            any rank, fails, gives something else than a number, or is not a mean over samples.
    """
    if metrics and objective.training_step is not None:
        raise InputError("metrics are of outputs, which a training_step keeps to itself; give the Trainer a loss instead")
    _begin(model, batches)
    sums = torch.zeros(2 + 2 * len(metrics), dtype=torch.float64, device="cpu")
    is_judged, is_first, problem = False, True, None
    with _looking(model, precision):
        for portion in batches.epoch(0, model, agree=True):
            batch, here = portion.here, samples_of(portion.here)
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
            if counts and loss is not None:
                sums[0] += loss.item() * (here if counting is not None else 1)
                sums[1] += here * (1 - counting.left_out(loss)) if counting is not None else 0.0
                try:
                    sums[2:] += _measured(metrics, objective, output, batch, check=not is_judged)
                    is_judged = True
                except CommError:
                    raise
                except Exception as error:
                    problem = problem or error
            if metrics and is_first:
                _refuse(model.comm, problem)
                is_first = False
    if metrics:
        _refuse(model.comm, problem)
    model.comm.allreduce(sums)
    found = {
        name: total / weight if weight else math.nan
        for name, (total, weight) in zip(("loss", *metrics), sums.reshape(-1, 2).tolist(), strict=True)
    }
    return found if model.reduction == "mean" else {**found, "loss": float(sums[0])}


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
_MEAN = 1e-3
"""Relative difference from which a metric is not a mean over samples."""


def _measured(metrics: Mapping[str, Metric], objective: Objective, output: Any, batch: Any, *, check: bool) -> torch.Tensor:
    """For each metric, its sum over the samples of this rank, and how many samples' worth of targets count.

    Args:
        check: whether each metric that the user has written is tried on halves of the samples.

    Raises:
        InputError: a metric fails, gives something else than a number, or is not a mean over samples.
    """
    target, samples, sums = objective.target_of(batch), samples_of(batch), list[float]()
    for name, metric in metrics.items():
        weight, used = float(samples), metric
        if metric is accuracy:
            if isinstance(target, torch.Tensor) and target.numel():
                weight *= float((target != objective.ignored).double().mean())
            used = partial(accuracy, ignored=objective.ignored)
        elif check and metric not in METRICS.values():
            _check_mean(name, metric, output, target, samples=samples)
        # The mean over no target is not a number.
        sums += [weight * _number(name, used, output, target)[0], weight] if weight else [0.0, 0.0]
    return torch.tensor(sums, dtype=torch.float64, device="cpu")


def _refuse(comm: AbstractCommunicator, problem: Exception | None) -> None:
    """Raise on all ranks what a metric has raised on one. Collective."""
    problems = problems_of(comm, problem and str(problem))
    if problems:
        raise known_to_all(InputError(next(iter(problems.values())))) from problem


def _number(name: str, metric: Callable[..., Any], output: Any, target: Any) -> tuple[float, float]:
    """What a metric gives, and by how much that may be rounded.

    Raises:
        InputError: the metric fails, or gives something else than a number.
    """
    try:
        value = metric(output, target)
    except (InputError, CommError):
        raise
    except Exception as error:
        raise InputError(f"the metric {name!r} failed with {type(error).__name__}: {error}") from error
    try:
        low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return float(value), 2 * torch.finfo(value.dtype).eps if low else 0.0
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise InputError(
            f"the metric {name!r} gives a {type(value).__name__}{shape}; it must give one number, the mean over the samples"
        ) from None


def _check_mean(name: str, metric: Metric, output: Any, target: Any, *, samples: int) -> None:
    """
    Raises:
        InputError: the metric of these samples is not the mean of those of their halves, so that the mean over the ranks and
            batches would depend on how many there are.
    """
    leaves, structure = pytree.tree_flatten((output, target))
    cut = [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves]
    is_known = all(leaf.shape[0] == samples if is_cut else leaf is None for leaf, is_cut in zip(leaves, cut, strict=True))
    if samples < 2 or not is_known:
        return
    whole, rounding = _number(name, metric, output, target)
    spans = Span(0, samples // 2), Span(samples // 2, samples)
    halves = [
        pytree.tree_unflatten([leaf if leaf is None else leaf[span.slice()] for leaf in leaves], structure) for span in spans
    ]
    parts = [_number(name, metric, *half)[0] for half in halves]
    mean = sum(part * span.size for part, span in zip(parts, spans, strict=True)) / samples
    allowed = max(_MEAN, rounding) * max(map(abs, (whole, *parts)))
    if abs(whole - mean) > allowed or math.isnan(whole) != math.isnan(mean):
        raise InputError(
            f"the metric {name!r} is {whole:g} over {samples} samples and {parts[0]:g} and {parts[1]:g} over their halves, so "
            "that it is not a mean over samples, and would depend on the number of ranks. Give a mean over samples, or compute "
            "it from Trainer.predict"
        )


def accuracy(output: torch.Tensor, target: torch.Tensor, *, ignored: int = IGNORED) -> float:
    """The share of targets that have the highest score: (samples, classes, ...) or (samples, ..., classes), as (samples, ...).

    Targets of `ignored` are left out, as losses leave them out.

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
    return float((output.argmax(axes[0]) == target)[target != ignored].double().mean())


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
