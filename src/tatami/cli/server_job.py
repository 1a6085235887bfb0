"""The options of `tatami server`'s commands, and the library's settings made from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tatami.cli.options import finite, optional
from tatami.errors import InputError
from tatami.inputs import LARGEST_SEED

if TYPE_CHECKING:
    from tatami.server import RunSettings
    from tatami.server.consistency import AbstractConsistency
    from tatami.server.recovery import AbstractRecovery


class Recovery(StrEnum):
    """The names of the recovery policies."""

    FROM_SERVERS = "from-servers"
    CHECKPOINT = "checkpoint"
    IGNORE = "ignore"


class Consistency(StrEnum):
    """The names of the consistency models."""

    BSP = "bsp"
    SSP = "ssp"
    ASP = "asp"
    BACKUP = "backup"


class Optimizer(StrEnum):
    """The names of the optimizers that run on the servers."""

    SGD = "sgd"
    ADAM = "adam"


@dataclass(frozen=True, kw_only=True)
class ServerOutputs:
    """The options that `train` and `resume` share: the place of the run and its output files."""

    address: Annotated[str | None, optional(help="Address of a Ray cluster. Default: this machine.")] = None
    report: Annotated[Path | None, optional(help="Report to write, however the run ends.")] = None
    log: Annotated[Path | None, optional(help="Log to write: a JSON line for each round and failure.")] = None
    tensorboard: Annotated[Path | None, optional(metavar="DIR", help="Folder for TensorBoard's curves.")] = None
    output: Annotated[Path | None, optional(help="File for the weights (safetensors).")] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite these files.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class ServerTrainJob(ServerOutputs):
    """The options of `tatami server train`; their help texts describe the fields."""

    script: Annotated[Path, typer.Argument(metavar="SCRIPT.PY", help="Script that defines model_fn, loss_fn and dataset.")]
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds, each with one batch.")] = 100
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 4
    servers: Annotated[int, typer.Option(min=1, help="Number of servers.")] = 2
    spares: Annotated[int, typer.Option(min=0, help="Number of spare workers.")] = 1
    replicas: Annotated[int, typer.Option(min=1, help="Number of servers that hold each parameter.")] = 1
    min_workers: Annotated[int, typer.Option(min=1, help="Minimum number of workers; with fewer the run stops.")] = 1
    batch_size: Annotated[int, typer.Option(min=1, help="Number of samples in a round.")] = 256
    cluster: Annotated[Path | None, optional(metavar="CLUSTER.TOML", help="File with the workers' speeds.")] = None
    optimizer: Annotated[Optimizer, typer.Option(help="Optimizer, which runs on the servers.")] = Optimizer.SGD
    lr: Annotated[float | None, optional(callback=finite, help="Learning rate; 0.1 for SGD, 0.001 for Adam.")] = None
    momentum: Annotated[float, typer.Option(callback=finite, help="SGD momentum.")] = 0.0
    clip_norm: Annotated[float | None, optional(callback=finite, help="Clip gradients to this norm.")] = None
    recovery: Annotated[Recovery, typer.Option(help="Recovery policy when a worker dies.")] = Recovery.FROM_SERVERS
    every: Annotated[str, typer.Option(metavar="N|daly", help="Rounds between checkpoints, for --recovery checkpoint.")] = "1"
    consistency: Annotated[Consistency, typer.Option(help="Consistency model of the workers.")] = Consistency.BSP
    staleness: Annotated[int, typer.Option(min=0, help="Rounds that a worker may be ahead of the slowest, for ssp.")] = 1
    backups: Annotated[int, typer.Option(min=1, help="Updates that a round does not wait for, for backup.")] = 1
    heartbeat: Annotated[float, typer.Option(callback=finite, help="Seconds of silence until a process counts as dead.")] = 2.0
    directory: Annotated[Path | None, optional(help="Folder for checkpoints.")] = None
    save_every: Annotated[int | None, optional(min=1, help="Rounds between checkpoints to resume from.")] = None
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed for parameters and batches.")] = 0

    def settings(self) -> RunSettings:
        """Make the library's settings.

        Raises:
            InputError: a number is invalid, or `every` is neither a number nor "daly".
            ClusterError: the cluster file is invalid.
        """
        from tatami.cluster import read_cluster
        from tatami.server import SGD, Adam, RunSettings

        sgd = self.optimizer is Optimizer.SGD
        rate = self.lr if self.lr is not None else 0.1 if sgd else 0.001
        return RunSettings(
            rounds=self.rounds,
            workers=self.workers,
            servers=self.servers,
            spares=self.spares,
            replicas=self.replicas,
            min_workers=self.min_workers,
            batch_size=self.batch_size,
            optimizer=SGD(lr=rate, momentum=self.momentum) if sgd else Adam(lr=rate),
            clip_norm=self.clip_norm,
            recovery=recovery_of(self.recovery, every=self.every),
            consistency=self._consistency(),
            speeds=() if self.cluster is None else read_cluster(self.cluster).plain_speeds("the parameter server"),
            heartbeat_s=self.heartbeat,
            save_every=self.save_every,
            seed=self.seed,
            script=str(self.script.resolve()),
        )

    def _consistency(self) -> AbstractConsistency:
        from tatami.server import ASP, BSP, SSP, Backup

        match self.consistency:
            case Consistency.SSP:
                return SSP(staleness=self.staleness)
            case Consistency.ASP:
                return ASP()
            case Consistency.BACKUP:
                return Backup(workers=self.backups)
            case Consistency.BSP:
                return BSP()


def recovery_of(name: Recovery, *, every: str) -> AbstractRecovery:
    """Make the recovery policy of this name.

    Raises:
        InputError: `every`, for checkpoints, is neither a number nor "daly".
    """
    from tatami.server.recovery import Checkpoint, FromServers, Ignore

    match name:
        case Recovery.CHECKPOINT:
            if every != "daly" and not every.isdecimal():
                raise InputError(f"--every takes a number of rounds or 'daly', not {every!r}")
            return Checkpoint(every="daly" if every == "daly" else int(every))
        case Recovery.FROM_SERVERS:
            return FromServers()
        case Recovery.IGNORE:
            return Ignore()


@dataclass(frozen=True, kw_only=True)
class ServerResumeJob(ServerOutputs):
    """The options of `tatami server resume`."""

    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The --directory of `tatami server train`.")]
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of the whole run. Default: unchanged.")] = None
    script: Annotated[Path | None, optional(help="New place of the script, if it has moved.")] = None
