"""`train`: one model on workers and servers that may die."""

from __future__ import annotations

import math
import site
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tatami.clock import Clock, SystemClock
from tatami.cluster import Cluster
from tatami.errors import InputError
from tatami.server import checkpoints
from tatami.server.consistency import BSP, AbstractConsistency
from tatami.server.engine import engine, require_ray
from tatami.server.learner import Course, Data, LossFn, ModelFn, check_model, cut, flatten, signature
from tatami.server.optimizers import SGD, AbstractOptimizer
from tatami.server.phases import PhaseHook
from tatami.server.protocol import DEFAULT_RESTARTS, Protocol
from tatami.server.recovery import AbstractRecovery, Checkpoint, FromServers
from tatami.server.report import RunReport
from tatami.server.saving import Saved
from tatami.server.state import Coordinator

if TYPE_CHECKING:
    from tatami.server.runtime import Runtime

HEARTBEAT_S = 2.0


def train(
    model_fn: ModelFn,
    loss_fn: LossFn,
    *,
    dataset: Data,
    rounds: int,
    workers: int = 4,
    servers: int = 2,
    spares: int = 1,
    batch_size: int = 256,
    optimizer: AbstractOptimizer | None = None,
    clip_norm: float | None = None,
    recovery: AbstractRecovery | None = None,
    consistency: AbstractConsistency | None = None,
    replicas: int = 1,
    restarts: int = DEFAULT_RESTARTS,
    min_workers: int = 1,
    speeds: Sequence[float] | Cluster = (),
    heartbeat_s: float = HEARTBEAT_S,
    directory: Path | str | None = None,
    save_every: int | None = None,
    resume: bool = False,
    seed: int = 0,
    address: str | None = None,
    on_round: Callable[[Runtime], None] | None = None,
    on_phase: PhaseHook | None = None,
    clock: Clock | None = None,
) -> tuple[nn.Module, RunReport]:
    """Train a model on parameter servers, and go on when machines die.

    Args:
        model_fn: builds the model; called here and in every worker, it must give the same layers each time. The first
            parameters are those of the model built here, under `torch.manual_seed(seed)`.
        loss_fn: of `(model(x), y)`, a scalar: the mean over the samples.
        dataset: all inputs and all targets as tensors (samples, ...), or a map-style data set.
        rounds: each on `batch_size` samples, which the workers divide among them.
        spares: processes that stand by; `restarts` further ones may be started to keep up their number.
        optimizer: `tatami.server.SGD(lr=0.1)` if None; runs on the servers.
        clip_norm: the longest gradient, over all parameters.
        recovery: what is done about a dead worker; `FromServers()` if None.
        consistency: `BSP()` if None.
        replicas: on how many servers each shard lies.
        speeds: of the workers, relative, for unequal shares.
        heartbeat_s: a process that is silent for longer is declared dead.
        directory: of checkpoints; needed by `Checkpoint`, and where `save_every` or `resume` is given.
        resume: go on from the last whole checkpoint in `directory`.
        address: of a Ray cluster; None runs on this machine.
        on_round: called here after every commit; may add and remove workers.
        on_phase: called in the workers at each phase of a task: for tests of failures.

    Returns:
        The trained model, an ordinary module as `model_fn` builds it, and what happened.

    Raises:
        InputError: what cannot be, before anything is started.
        ModelError: a model that cannot be trained this way, or that differs between workers.
        CheckpointError: nothing to resume from.
        MissingExtraError: Ray is not installed.
        TrainingError: the run cannot go on, as all copies of a shard are lost, or too few workers are left.
        NotFiniteError: no worker has a finite loss.
    """
    ray = require_ray()
    recovery = recovery or FromServers()
    folder = _directory(directory, recovery=recovery, save_every=save_every, resume=resume)
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm must be > 0, not {clip_norm}")
    if not (math.isfinite(heartbeat_s) and heartbeat_s > 0):
        raise InputError(f"heartbeat_s must be a number of seconds > 0, not {heartbeat_s}")
    torch.manual_seed(seed)
    model = model_fn()
    check_model(model)
    first = flatten([parameter.detach() for parameter in model.parameters() if parameter.requires_grad]).copy()
    if servers > len(first):
        raise InputError(f"{servers} servers, but only {len(first)} parameters to hold; at most {len(first)} servers can help")
    protocol = Protocol(
        rounds=rounds,
        workers=workers,
        servers=servers,
        shards=servers,
        spares=spares,
        restarts=restarts,
        min_workers=min_workers,
        replicas=replicas,
        consistency=consistency or BSP(),
        recovery=recovery,
        clips=clip_norm is not None,
        save_every=save_every,
    )
    course = Course(samples=_samples(dataset), batch_size=batch_size, seed=seed, speeds=_speeds(speeds, workers=workers))
    facts: dict[str, Any] = {
        "model": signature(model),
        "samples": course.samples,
        "batch_size": batch_size,
        "seed": seed,
        "optimizer": repr(optimizer or SGD(lr=0.1)),
    }
    saved, snapshots = (None, None) if not resume or folder is None else _stored(folder, facts, protocol, len(first))
    facts["start"] = 0 if saved is None else saved.version

    from tatami.server.actors import Job
    from tatami.server.runtime import Runtime, Terms

    job = Job(model_fn=model_fn, loss_fn=loss_fn, course=course, protocol=protocol, hook=on_phase)
    with _by_value(model_fn, loss_fn, on_phase):
        pickled_job = ray.cloudpickle.dumps(job)
    terms = Terms(
        first=first,
        signature=signature(model),
        optimizer=optimizer or SGD(lr=0.1),
        clip_norm=clip_norm,
        whole_batch=None if protocol.consistency.lockstep else min(batch_size, course.samples),
        directory=folder,
        heartbeat_s=heartbeat_s,
        facts=facts,
        snapshots=snapshots,
    )
    with engine(address=address):
        runtime = Runtime(
            Coordinator(protocol, resumed=saved),
            job=job,
            pickled_job=pickled_job,
            data=dataset,
            terms=terms,
            clock=clock or SystemClock(),
            on_round=on_round,
        )
        parameters, report = runtime.run()
    _load(model, parameters)
    return model, report


def _directory(
    directory: Path | str | None, *, recovery: AbstractRecovery, save_every: int | None, resume: bool
) -> Path | None:
    if isinstance(recovery, Checkpoint) and recovery.directory is not None:
        directory = recovery.directory
    if directory is None:
        if isinstance(recovery, Checkpoint) or save_every is not None or resume:
            raise InputError("where are the checkpoints? Give directory=...")
        return None
    checkpoints.check_directory(Path(directory))
    return Path(directory)


def _samples(dataset: Data) -> int:
    if isinstance(dataset, tuple):
        if len(dataset[0]) != len(dataset[1]):
            raise InputError(f"{len(dataset[0])} inputs but {len(dataset[1])} targets; each input needs one")
        size = len(dataset[0])
    else:
        size = len(dataset)
    if size == 0:
        raise InputError("the data set is empty")
    return size


def _speeds(speeds: Sequence[float] | Cluster, *, workers: int) -> tuple[float, ...]:
    values = [each.speed for each in speeds.processors] if isinstance(speeds, Cluster) else list(speeds)
    if values and len(values) != workers:
        raise InputError(f"{len(values)} speeds for {workers} workers; give one for each, or none")
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise InputError(f"speeds must be finite and > 0, not {values}")
    return tuple(values)


def _stored(folder: Path, facts: dict[str, Any], protocol: Protocol, size: int) -> tuple[Saved, tuple[dict[str, Any], ...]]:
    stored = checkpoints.read(folder)
    for name, value in facts.items():
        if stored.terms.get(name) != value:
            raise InputError(f"{folder} is of another run: its {name} is {stored.terms.get(name)!r}, here it is {value!r}")
    import warnings

    for problem in stored.problems:
        warnings.warn(f"{problem}; version {stored.saved.version} is used", stacklevel=3)
    stretches = cut(size, shards=protocol.shards)
    return stored.saved, tuple(checkpoints.recut(stored.snapshots, stretches=stretches))


def _load(model: nn.Module, parameters: Any) -> None:
    flat, start = torch.from_numpy(parameters), 0
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()


@contextmanager
def _by_value(*functions: Any) -> Iterator[None]:
    """Send the user's own modules along: a worker's process could not import a script or a test."""
    ray = require_ray()
    installed = (*site.getsitepackages(), sys.prefix, sys.base_prefix)
    modules = []
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
        file = getattr(module, "__file__", None)
        known = module is None or module.__name__ == "__main__" or module.__name__.startswith("tatami.")
        if module is not None and not known and file and not file.startswith(installed):
            modules.append(module)
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in set(modules):
            ray.cloudpickle.unregister_pickle_by_value(module)
