"""What the coordinator wants done: orders that Ray carries out in a real run, and a simulator in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(Enum):
    """Why a run stopped before its last round."""

    TOO_FEW_WORKERS = "too few workers"
    NOT_FINITE = "loss not finite"
    SHARDS_LOST = "shards lost"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The update of one worker for one round, named by the process that sent it."""

    worker: int
    process: int
    round: int


@dataclass(frozen=True, kw_only=True)
class SendTask:
    """Have `process` pull the parameters of `version`, compute its share of `round`, and push the update of every shard.

    Attributes:
        members: the workers among which the round's batch is divided, in order.
        redone: another process had begun this task and died.
        servers: that take part: each shard goes to those of its holders that are among them.
    """

    worker: int
    process: int
    round: int
    attempt: int
    version: int
    members: tuple[int, ...]
    redone: bool
    servers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StartSpare:
    """Start a process that stands by; a `SpareReady` or a `ProcessDied` must follow."""

    process: int


@dataclass(frozen=True, kw_only=True)
class StartServer:
    """Start a server in place of one that is gone; a `ServerReady` or a `ServerDied` must follow."""

    server: int


@dataclass(frozen=True, kw_only=True)
class EndProcess:
    """End the process of a worker that leaves, or one that has hung, and refuse everything that comes from it."""

    process: int


@dataclass(frozen=True, kw_only=True)
class EndServer:
    """End a server that has hung."""

    server: int


@dataclass(frozen=True, kw_only=True)
class SumShard:
    """Have a server add up the contributions to one shard, in this order; its `ShardSummed` must follow."""

    ticket: int
    shard: int
    server: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, kw_only=True)
class ApplyShard:
    """Have a server apply the contributions to one shard, summed in this order; its `ShardApplied` must follow.

    Attributes:
        version: of the parameters afterwards.
        squared_norm: of the sum over all shards, for clipping; None where nothing clips.
        clocks: of each worker afterwards: pushes for earlier rounds are to be dropped and refused.
    """

    ticket: int
    shard: int
    server: int
    version: int
    contributions: tuple[Contribution, ...]
    squared_norm: float | None
    clocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class CopyShard:
    """Copy the state of a shard from server `source` to `server`, which is new; its `ShardCopied` must follow.

    Attributes:
        clocks: of each worker: pushes for earlier rounds are to be refused there, too.
    """

    ticket: int
    shard: int
    source: int
    server: int
    attempt: int
    clocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class WriteCheckpoint:
    """Put the state of all shards on disk; `CheckpointWritten` or `CheckpointFailed` must follow."""

    ticket: int
    version: int
    clocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ReadCheckpoint:
    """Bring `servers` to the checkpoint of `version`, without any push of earlier attempts; `CheckpointRead` follows."""

    ticket: int
    version: int
    attempt: int
    servers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Warn:
    """Tell the user."""

    message: str


@dataclass(frozen=True, kw_only=True)
class FetchResult:
    """All rounds are applied: bring the parameters of all shards out of the servers; `ResultFetched` must follow."""

    ticket: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """All rounds are applied, and their result is fetched."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The run cannot go on; its state was written first where that is possible."""

    cause: Cause
    reason: str


Action = (
    SendTask
    | StartSpare
    | StartServer
    | EndProcess
    | EndServer
    | SumShard
    | ApplyShard
    | CopyShard
    | WriteCheckpoint
    | ReadCheckpoint
    | FetchResult
    | Warn
    | Finish
    | Stop
)
