"""What a run's processes are told, and what its checkpoints are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tatami.server.optimizers import AbstractOptimizer, Vector
from tatami.server.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the processes and the disk must know of a run.

    Attributes:
        pickled_spec: a `WorkerSpec`, for the workers.
        data: the data set, for the workers.
        first: all parameters at the start, (elements,).
        snapshots: of each shard, where the run goes on from a checkpoint.
        facts: kept in each checkpoint, to tell whether it is of this run.
    """

    protocol: Protocol
    pickled_spec: bytes
    data: Any
    first: Vector
    signature: str
    optimizer: AbstractOptimizer
    clip_norm: float | None
    whole_batch: int | None
    directory: Path | None
    heartbeat_s: float
    facts: Mapping[str, Any]
    snapshots: tuple[dict[str, Vector], ...] | None = None
