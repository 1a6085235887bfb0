"""`train`: one model on workers and servers that may die."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tatami.datasets.dataset import Data
from tatami.engine.ray_engine import require_ray
from tatami.errors import InputError
from tatami.server import checkpoints
from tatami.server.launch import run_training
from tatami.server.learner import LossFn, ModelFn, TrainingSpec
from tatami.server.recovery import Checkpoint
from tatami.server.report import RunReport
from tatami.server.run_context import RunContext
from tatami.server.run_settings import RunSettings


def train(
    model_fn: ModelFn,
    loss_fn: LossFn,
    *,
    dataset: Data,
    settings: RunSettings,
    directory: Path | str | None = None,
    context: RunContext | None = None,
) -> tuple[nn.Module, RunReport]:
    """Train a model on parameter servers, and go on when machines die.

    Args:
        model_fn: builds the model; called here and in every worker, it must give the same layers each time. The first
            parameters are those of the model built here, under `torch.manual_seed(settings.seed)`.
        loss_fn: of `(model(x), y)`, a scalar: the mean over the samples.
        dataset: all inputs and all targets as tensors (samples, ...), or a map-style data set.
        settings: the numbers and policies of the run; they are kept in `directory`, for `resume`.
        directory: of checkpoints; needed by `Checkpoint` and by `save_every`. `resume` goes on from there.
        context: where the run takes place, and who hears of it.

    Returns:
        The trained model, an ordinary module as `model_fn` builds it, and what happened.

    Raises:
        InputError: arguments that do not fit each other, before anything is started.
        ModelError: a model that cannot be trained this way, or that differs between workers.
        MissingExtraError: Ray is not installed.
        TrainingError: the run cannot go on, as all copies of a shard are lost, or too few workers are left.
        NotFiniteError: no worker has a finite loss.
    """
    require_ray()
    recovery = settings.recovery
    if isinstance(recovery, Checkpoint) and recovery.directory is not None:
        directory = recovery.directory
    if directory is None and (isinstance(recovery, Checkpoint) or settings.save_every is not None):
        raise InputError("where are the checkpoints? Give directory=...")
    folder = None if directory is None else Path(directory)
    if folder is not None:
        checkpoints.check_directory(folder)
        if checkpoints.versions(folder):
            raise InputError(
                f"{folder} holds the checkpoints of another run; tatami.server.resume({str(folder)!r}, ...) goes on with it. "
                "Give a new directory, or remove it"
            )
    spec = TrainingSpec(model_fn=model_fn, loss_fn=loss_fn, dataset=dataset)
    return run_training(spec, settings, folder=folder, resumes=False, context=context or RunContext())


def resume(
    directory: Path | str,
    *,
    model_fn: ModelFn,
    loss_fn: LossFn,
    dataset: Data,
    settings: RunSettings | None = None,
    context: RunContext | None = None,
) -> tuple[nn.Module, RunReport]:
    """Go on with a run whose driver died or that was stopped, from the last checkpoint that is whole.

    With the same functions, data, and number of workers it ends in the parameters of the undisturbed run, to the bit.
    Functions and data are not in the directory, as nothing of it is executed; all numbers and policies are.

    Args:
        directory: what `train(..., directory=...)` was given.
        model_fn, loss_fn, dataset: as of `train`.
        settings: what the run began with if None. Else some of them are changed, as by
            `dataclasses.replace(RunSettings.read(directory), rounds=400)` for a longer run.
        context: where the run takes place, and who hears of it.

    Returns:
        As `train`.

    Raises:
        CheckpointError: there is nothing whole to go on from.
        InputError: the model or the data is not that of the run.
        TrainingError: and others, as `train`.
    """
    require_ray()
    folder = Path(directory)
    settings = settings or RunSettings.read(folder)
    spec = TrainingSpec(model_fn=model_fn, loss_fn=loss_fn, dataset=dataset)
    return run_training(spec, settings, folder=folder, resumes=True, context=context or RunContext())
