"""A run: its numbers and policies, kept as JSON beside its checkpoints, where it takes place, and the phases of its tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from tatami.checkpoints.files import seal, unseal
from tatami.errors import CheckpointError, InputError
from tatami.inputs import check_at_least, check_seed
from tatami.outputs import write_text
from tatami.server.consistency import ASP, BSP, SSP, AbstractConsistency, Backup
from tatami.server.optimizers import SGD, AbstractOptimizer, Adam
from tatami.server.recovery import AbstractRecovery, Checkpoint, FromServers, Ignore

RUN_FILE = "run.json"
HEARTBEAT_S = 2.0
DEFAULT_RESTARTS = 8
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (ASP, BSP, SSP, Backup, SGD, Adam, Checkpoint, FromServers, Ignore)}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """A training run's numbers and policies: what `tatami.server.train` takes, the command line builds, and `resume` reads.

    The coordinator runs by the same settings, also in a simulation, where those that only processes need are not used.

    Attributes:
        rounds: each on `batch_size` samples, which the workers divide among them.
        workers: processes that compute.
        servers: processes that hold the parameters, in as many shards; shard k belongs to server k.
        spares: processes that stand by; `restarts` further ones may be started to keep up their number, and that of servers.
        batch_size: samples of a round.
        optimizer: runs on the servers.
        clip_norm: the longest gradient, over all parameters; None does not shorten gradients.
        recovery: what is done about a dead worker.
        consistency: how far workers may drift apart.
        replicas: on how many servers each shard is kept: its own, and those after it.
        restarts: see `spares`.
        min_workers: with fewer the run stops.
        speeds: of the workers, relative, for unequal shares; of a cluster, `tuple(cluster.speeds.values())`.
        heartbeat_s: a process that is silent for longer is declared dead.
        save_every: rounds between two checkpoints, where the recovery itself needs none.
        seed: of the first parameters and of the batches.
        script: what the command line was given; None for a run from Python.

    Raises:
        InputError: invalid numbers.
    """

    rounds: int
    workers: int = 4
    servers: int = 2
    spares: int = 1
    batch_size: int = 256
    optimizer: AbstractOptimizer = field(default_factory=lambda: SGD(lr=0.1))
    clip_norm: float | None = None
    recovery: AbstractRecovery = field(default_factory=FromServers)
    consistency: AbstractConsistency = field(default_factory=BSP)
    replicas: int = 1
    restarts: int = DEFAULT_RESTARTS
    min_workers: int = 1
    speeds: tuple[float, ...] = ()
    heartbeat_s: float = HEARTBEAT_S
    save_every: int | None = None
    seed: int = 0
    script: str | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_at_least(0, rounds=self.rounds, spares=self.spares, restarts=self.restarts)
        check_at_least(1, workers=self.workers, servers=self.servers, min_workers=self.min_workers, replicas=self.replicas)
        if self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1 sample, not {self.batch_size}")
        if self.save_every is not None and self.save_every < 1:
            raise InputError(f"save_every must be at least 1 round, not {self.save_every}")
        if self.replicas > self.servers:
            raise InputError(
                f"replicas={self.replicas}, but there are only {self.servers} servers: each copy of a shard needs its own. "
                f"Start {self.replicas} servers or more, or ask for fewer replicas"
            )
        if self.min_workers > self.workers:
            raise InputError(
                f"min_workers={self.min_workers} is more than the {self.workers} workers that there are to begin with"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm must be > 0, not {self.clip_norm}")
        if not (math.isfinite(self.heartbeat_s) and self.heartbeat_s > 0):
            raise InputError(f"heartbeat_s must be a number of seconds > 0, not {self.heartbeat_s}")
        if self.speeds and len(self.speeds) != self.workers:
            raise InputError(f"{len(self.speeds)} speeds for {self.workers} workers; give one for each, or none")
        if not all(math.isfinite(value) and value > 0 for value in self.speeds):
            raise InputError(f"speeds must be finite and > 0, not {list(self.speeds)}")

    def holders(self, shard: int) -> tuple[int, ...]:
        """The servers that keep this shard, first the one it belongs to."""
        return tuple((shard + copy) % self.servers for copy in range(self.replicas))

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """(shard, server) for every copy of every shard."""
        return tuple((shard, server) for shard in range(self.servers) for server in self.holders(shard))

    def partners(self, server: int) -> tuple[int, ...]:
        """The servers that hold copies of the same shards as this one; they should be on other nodes."""
        together = {other for shard, held_by in self.copies if held_by == server for other in self.holders(shard)}
        return tuple(sorted(together - {server}))

    def record(self) -> dict[str, Any]:
        """The settings as JSON keeps them."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    def write(self, directory: Path) -> None:
        """Keep them in `directory`. Raises OSError as any file does."""
        write_text(directory / RUN_FILE, seal(self.record()), force=True)

    @classmethod
    def read(cls, directory: Path | str) -> RunSettings:
        """What `write` has kept.

        Raises:
            CheckpointError: there is nothing of a run, or it is damaged.
        """
        path = Path(directory) / RUN_FILE
        try:
            values = unseal(path.read_text(encoding="utf-8"))
            return cls(**{name: _thing(value) for name, value in values.items()})
        except FileNotFoundError:
            raise CheckpointError(f"{directory} holds no run: there is no {RUN_FILE} in it") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


def _plain(value: Any) -> Any:
    if type(value).__name__ in _KINDS:
        inner = {name: str(each) if isinstance(each, Path) else each for name, each in asdict(value).items()}
        return {"kind": type(value).__name__, **inner}
    if isinstance(value, AbstractOptimizer | AbstractRecovery | AbstractConsistency):
        return {"kind": type(value).__name__}  # one of the user's own: `resume` must be given it again
    return value


def _thing(value: Any) -> Any:
    if isinstance(value, dict):
        rest = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items() if name != "kind"}
        return _KINDS[value["kind"]](**rest)
    return tuple(value) if isinstance(value, list) else value


class TaskPhase(Enum):
    """Where in a task a worker is."""

    PULL = "in the pull"
    BEFORE_COMPUTE = "before compute"
    COMPUTE = "in compute"
    BETWEEN_SHARDS = "between two shards of a push"
    AFTER_PUSH = "after the push"


PhaseHook = Callable[[TaskPhase, int, int], None]
"""Called in the worker's process with the phase, the process number and the round."""
