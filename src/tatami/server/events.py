"""What happens to a parameter-server run: all that the coordinator is informed of. Times are in the events; it has no clock.

An answer names the task or order that it is about, so that one that comes late can be recognized.
"""

from __future__ import annotations

from dataclasses import dataclass

from tatami.server import actions as act


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened `at_s` seconds after the start of the run."""

    at_s: float


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """Servers and first workers are up; process w holds place w."""


@dataclass(frozen=True, kw_only=True)
class OfTask(Event):
    """Something about the task that a process was sent."""

    task: act.SendTask


@dataclass(frozen=True, kw_only=True)
class ShardReceived(OfTask):
    """A server holds this worker's update of one shard, not yet applied. May come twice, late, or out of order."""

    shard: int
    server: int


@dataclass(frozen=True, kw_only=True)
class UpdateRejected(OfTask):
    """A worker's update is not to be applied, as its loss is not finite."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class TaskFailed(OfTask):
    """A worker could not pull or push, as a server went away meanwhile; it is alive."""


@dataclass(frozen=True, kw_only=True)
class ShardSummed(Event):
    """A server has added up the updates of a commit; `squared_norm` is that of its sum."""

    order: act.SumShard
    squared_norm: float


@dataclass(frozen=True, kw_only=True)
class ShardApplied(Event):
    """A server has applied a commit to one shard."""

    order: act.ApplyShard


@dataclass(frozen=True, kw_only=True)
class ShardCopied(Event):
    """A new server holds a copy of a shard."""

    order: act.CopyShard


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint is on disk, whole; or, for a `problem`, it is not, and the one before is still whole."""

    order: act.WriteCheckpoint
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointRead(Event):
    """All servers hold the state of a checkpoint: `version`, which may be older than asked, and its `clocks`."""

    order: act.ReadCheckpoint
    version: int
    clocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ResultFetched(Event):
    """The parameters of all shards are out of the servers."""

    order: act.FetchResult


@dataclass(frozen=True, kw_only=True)
class ProcessDied(Event):
    """The process of a worker or a spare is gone; `late`: it has missed its heartbeat, as it hangs or is cut off."""

    process: int
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class SpareReady(Event):
    """A spare is up and waits."""

    process: int


@dataclass(frozen=True, kw_only=True)
class WorkerJoins(Event):
    """The user asks for one more worker; it takes part from the round after its process is up."""


@dataclass(frozen=True, kw_only=True)
class WorkerLeaves(Event):
    """The user takes a worker out of the run, after its round."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class ServerDied(Event):
    """The process of a server is gone, did not come up, or, if `late`, has missed its heartbeat."""

    server: int
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerReady(Event):
    """A server that was started in place of a dead one is up, and holds nothing yet."""

    server: int
