"""`train`: one model on workers and servers that may die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tatami.clock import Clock
from tatami.cluster import Cluster
from tatami.datasets.samples import Data
from tatami.engine.ray_engine import require_ray
from tatami.errors import InputError
from tatami.records import Records
from tatami.server import checkpoints
from tatami.server.consistency import BSP, AbstractConsistency
from tatami.server.launch import Surroundings, run_training
from tatami.server.learner import LossFn, ModelFn
from tatami.server.optimizers import SGD, AbstractOptimizer
from tatami.server.phases import PhaseHook
from tatami.server.protocol import DEFAULT_RESTARTS
from tatami.server.recovery import AbstractRecovery, Checkpoint, FromServers
from tatami.server.report import RunReport
from tatami.server.run_settings import HEARTBEAT_S, RunSettings
from tatami.server.training_spec import TrainingSpec

if TYPE_CHECKING:
    from tatami.engine.pool import Pool
    from tatami.server.runtime import Runtime


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
    seed: int = 0,
    address: str | None = None,
    report: Path | str | None = None,
    records: Records | None = None,
    on_round: Callable[[Runtime], None] | None = None,
    on_phase: PhaseHook | None = None,
    pool: Pool | None = None,
    clock: Clock | None = None,
    script: str | None = None,
) -> tuple[nn.Module, RunReport]:
    """Train a model on parameter servers, and go on when machines die.

    Args:
        model_fn: builds the model; called here and in every worker, it must give the same layers each time. The first
            parameters are those of the model built here, under `torch.manual_seed(seed)`.
        loss_fn: of `(model(x), y)`, a scalar: the mean over the samples.
        dataset: all inputs and all targets as tensors (samples, ...), or a map-style data set.
        rounds: each on `batch_size` samples, which the workers divide among them.
        spares: processes that stand by; `restarts` further ones may be started to keep up their number, and that of servers.
        optimizer: `tatami.server.SGD(lr=0.1)` if None; runs on the servers.
        clip_norm: the longest gradient, over all parameters.
        recovery: what is done about a dead worker; `FromServers()` if None.
        consistency: `BSP()` if None.
        replicas: on how many servers each shard lies.
        speeds: of the workers, relative, for unequal shares; or a cluster, one processor for each worker.
        heartbeat_s: a process that is silent for longer is declared dead.
        directory: of checkpoints; needed by `Checkpoint` and by `save_every`. `resume` goes on from there.
        save_every: rounds between two checkpoints, where the recovery itself needs none.
        address: of a Ray cluster; None runs on this machine.
        report: a file that is told what happened, however the run ends.
        records: written for every round and failure.
        on_round: called here after every commit; may add and remove workers.
        on_phase: called in the workers at each phase of a task: for tests of failures.
        pool: of processes from an earlier run on the same Ray; those that live are kept in it again.
        script: noted in `directory`, for `tatami server resume`.

    Returns:
        The trained model, an ordinary module as `model_fn` builds it, and what happened.

    Raises:
        InputError: what cannot be, before anything is started.
        ModelError: a model that cannot be trained this way, or that differs between workers.
        MissingExtraError: Ray is not installed.
        TrainingError: the run cannot go on, as all copies of a shard are lost, or too few workers are left.
        NotFiniteError: no worker has a finite loss.
    """
    require_ray()
    if isinstance(recovery, Checkpoint) and recovery.directory is not None:
        directory = recovery.directory
    if directory is None and (isinstance(recovery, Checkpoint) or save_every is not None):
        raise InputError("where are the checkpoints? Give directory=...")
    settings = RunSettings(
        rounds=rounds,
        workers=workers,
        servers=servers,
        spares=spares,
        batch_size=batch_size,
        optimizer=optimizer or SGD(lr=0.1),
        clip_norm=clip_norm,
        recovery=recovery or FromServers(),
        consistency=consistency or BSP(),
        replicas=replicas,
        restarts=restarts,
        min_workers=min_workers,
        speeds=_speeds(speeds),
        heartbeat_s=heartbeat_s,
        save_every=save_every,
        seed=seed,
        script=script,
    )
    folder = None if directory is None else Path(directory)
    if folder is not None:
        checkpoints.check_directory(folder)
        if checkpoints.versions(folder):
            raise InputError(
                f"{folder} holds the checkpoints of another run; tatami.server.resume({str(folder)!r}, ...) goes on with it. "
                "Give a new directory, or remove it"
            )
    surroundings = Surroundings(
        address=address, report=report, records=records, on_round=on_round, on_phase=on_phase, pool=pool, clock=clock
    )
    spec = TrainingSpec(model_fn=model_fn, loss_fn=loss_fn, dataset=dataset)
    return run_training(spec, settings, folder=folder, resumes=False, surroundings=surroundings)


def resume(
    directory: Path | str,
    *,
    model_fn: ModelFn,
    loss_fn: LossFn,
    dataset: Data,
    rounds: int | None = None,
    workers: int | None = None,
    servers: int | None = None,
    optimizer: AbstractOptimizer | None = None,
    recovery: AbstractRecovery | None = None,
    address: str | None = None,
    report: Path | str | None = None,
    records: Records | None = None,
    on_round: Callable[[Runtime], None] | None = None,
    on_phase: PhaseHook | None = None,
    pool: Pool | None = None,
    clock: Clock | None = None,
) -> tuple[nn.Module, RunReport]:
    """Go on with a run whose driver died or that was stopped, from the last checkpoint that is whole.

    With the same functions, data, and number of workers it ends in the parameters of the undisturbed run, to the bit.
    Functions and data are not in the directory, as nothing of it is executed; all numbers and policies are.

    Args:
        directory: what `train(..., directory=...)` was given.
        rounds: of the whole run, to make it longer or shorter; what the run began with if None. So are the others.

    Returns:
        As `train`.

    Raises:
        CheckpointError: there is nothing whole to go on from.
        InputError: the model or the data is not that of the run.
        TrainingError: and others, as `train`.
    """
    require_ray()
    folder = Path(directory)
    settings = RunSettings.read(folder)
    changes: dict[str, Any] = {
        "rounds": rounds,
        "workers": workers,
        "servers": servers,
        "optimizer": optimizer,
        "recovery": recovery,
    }
    settings = replace(settings, **{name: value for name, value in changes.items() if value is not None})
    surroundings = Surroundings(
        address=address, report=report, records=records, on_round=on_round, on_phase=on_phase, pool=pool, clock=clock
    )
    spec = TrainingSpec(model_fn=model_fn, loss_fn=loss_fn, dataset=dataset)
    return run_training(spec, settings, folder=folder, resumes=True, surroundings=surroundings)


def _speeds(speeds: Sequence[float] | Cluster) -> tuple[float, ...]:
    return tuple(each.speed for each in speeds.processors) if isinstance(speeds, Cluster) else tuple(speeds)
