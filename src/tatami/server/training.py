"""`train`: one model on workers and servers that may die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tatami.clock import SystemClock
from tatami.cluster.cores import memory_here
from tatami.datasets.dataset import Data
from tatami.engine.ray_engine import by_value, engine, require_ray
from tatami.engine.ray_watch import RayWatch, ray_processes
from tatami.errors import CheckpointError, InputError, warn
from tatami.report.server_run import RunReport
from tatami.server import checkpoints
from tatami.server.coordinator import Coordinator
from tatami.server.learner import Course, LossFn, ModelFn, TrainingSpec, flatten, signature
from tatami.server.optimizers import Vector
from tatami.server.pieces import cut
from tatami.server.recovery import Checkpoint
from tatami.server.run_context import RunContext
from tatami.server.run_settings import RunSettings
from tatami.server.saving import Saved, Terms
from tatami.server.shard import COUNT, PARAMETERS
from tatami.server.witness import Witness
from tatami.units import format_size


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


MOST_PROCESSES = 4096
"""The process of the run keeps them all."""
_WORKER_BYTES = 180_000_000
"""Memory of a process that has loaded torch; measured, without what it shares with others."""
_SERVER_BYTES = 55_000_000


def run_training(
    spec: TrainingSpec, settings: RunSettings, *, folder: Path | None, resumes: bool, context: RunContext
) -> tuple[nn.Module, RunReport]:
    """Train, from the start or from the last checkpoint in `folder`. Returns and raises as `tatami.server.train`."""
    ray = require_ray()
    processes = settings.workers + settings.servers + settings.spares
    if processes > MOST_PROCESSES:
        raise InputError(
            f"{settings.workers} workers, {settings.servers} servers and {settings.spares} spares are {processes} processes; "
            f"a run has at most {MOST_PROCESSES}"
        )
    if context.address is None and not ray.is_initialized():
        _check_room(settings)
    model = spec.model(seed=settings.seed)
    first = flatten([parameter.detach() for parameter in model.parameters() if parameter.requires_grad]).copy()
    if settings.servers > len(first):
        raise InputError(
            f"{settings.servers} servers, but only {len(first)} parameters to hold; at most {len(first)} servers can help"
        )
    course = Course(samples=spec.samples(), batch_size=settings.batch_size, seed=settings.seed, speeds=settings.speeds)
    facts: dict[str, Any] = {
        "model": signature(model),
        "samples": course.samples,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "optimizer": repr(settings.optimizer),
    }
    saved, snapshots = (None, None)
    if resumes and folder is not None:
        saved, snapshots = _stored(folder, facts, settings=settings, first=first)
    if folder is not None:
        settings.write(folder)

    from tatami.server.runtime import Runtime
    from tatami.server.worker_process import WorkerSpec

    worker_spec = WorkerSpec(
        model_fn=spec.model_fn, loss_fn=spec.loss_fn, course=course, settings=settings, hook=context.on_phase
    )
    with by_value(spec.model_fn, spec.loss_fn, context.on_phase):
        pickled_spec = ray.cloudpickle.dumps(worker_spec)
    terms = Terms(
        settings=settings,
        pickled_spec=pickled_spec,
        data=spec.dataset,
        first=first,
        whole_batch=None if settings.consistency.lockstep else min(settings.batch_size, course.samples),
        directory=folder,
        facts=facts,
        snapshots=snapshots,
    )
    start = 0 if saved is None else saved.version
    with (
        Witness(recovery=settings.recovery.name, start=start, report=context.report, directory=folder) as witness,
        engine(address=context.address),
        RayWatch(ray_processes(ray), clock=SystemClock(), tell=witness.fault) as watch,
    ):
        runtime = Runtime(Coordinator(settings, resumed=saved), terms=terms, context=context, watch=watch, witness=witness)
        try:
            parameters, outcome = runtime.run()
        finally:
            if context.report is not None:
                runtime.report().save(context.report, force=True)
    _load(model, parameters)
    return model, outcome


def _check_room(settings: RunSettings) -> None:
    """Whether the processes fit into this machine's memory, before the first of them is started."""
    computing = settings.workers + settings.spares
    needed = computing * _WORKER_BYTES + settings.servers * _SERVER_BYTES
    there = memory_here()
    if needed > there:
        raise InputError(
            f"{computing} workers and spares and {settings.servers} servers need {format_size(needed, digits=3)} of memory "
            f"before they hold anything, and this machine has {format_size(there, digits=3)}; start fewer, or give the "
            "address of a Ray cluster"
        )


def _stored(
    folder: Path, facts: dict[str, Any], *, settings: RunSettings, first: Vector
) -> tuple[Saved, tuple[dict[str, Any], ...]]:
    stored = checkpoints.read(folder)
    for name, value in facts.items():
        if stored.terms.get(name) != value:
            raise InputError(f"{folder} is of another run: its {name} is {stored.terms.get(name)!r}, here it is {value!r}")
    for problem in stored.problems:
        warn(f"{problem}; version {stored.saved.version} is used")
    held = {name for snapshot in stored.snapshots for name in snapshot}
    needed = {PARAMETERS, COUNT, *settings.optimizer.slots}
    found = sum(len(snapshot[PARAMETERS]) for snapshot in stored.snapshots)
    kind = stored.snapshots[0][PARAMETERS].dtype
    if (found, kind) != (len(first), first.dtype) or held != needed:
        raise CheckpointError(
            f"{folder} is of another run: it holds {found} parameters of {kind} with {', '.join(sorted(held))}; "
            f"here are {len(first)} of {first.dtype} with {', '.join(sorted(needed))}"
        )
    stretches = cut(len(first), shards=settings.servers)
    return stored.saved, tuple(checkpoints.recut(stored.snapshots, stretches=stretches))


def _load(model: nn.Module, parameters: Any) -> None:
    flat, start = torch.from_numpy(parameters), 0
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
