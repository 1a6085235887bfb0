"""When the next checkpoint is due, and what the processes and the disk must know of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tatami.server.optimizers import Vector
from tatami.server.recovery import Checkpoint, Remedy
from tatami.server.run_settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint: commits that it contains, and the rounds done by each worker."""

    version: int
    clocks: tuple[tuple[int, int], ...]

    @property
    def slowest(self) -> int:
        return min(clock for _, clock in self.clocks)


class Saving:
    """Counts the rounds since the last checkpoint, and learns what a round and a checkpoint take.

    Attributes:
        saved: the last checkpoint that is known to be whole.
        clock: rounds done by the slowest worker when it was written, or last tried to be.
    """

    def __init__(self, settings: RunSettings, *, saved: Saved | None) -> None:
        self._settings = settings
        self.saved = saved
        self.clock = 0 if saved is None else saved.slowest
        self._num_rounds, self._rounds_s = 0, 0.0
        self._write_s: float | None = None

    def round_took(self, seconds: float) -> None:
        self._num_rounds += 1
        self._rounds_s += seconds

    def written(self, saved: Saved, *, took_s: float) -> None:
        self.saved = saved
        self._write_s = took_s

    def due(self, *, slowest: int, workers: int, last: bool) -> bool:
        """Whether one is to be written before anything else is applied; `last` is whether no round will follow."""
        if not workers:
            return False
        recovery = self._settings.recovery
        interval = self._settings.save_every
        if isinstance(recovery, Checkpoint):
            if self.saved is None:
                return True
            mean_s = self._rounds_s / self._num_rounds if self._num_rounds else None
            interval = recovery.interval(write_s=self._write_s, round_s=mean_s, workers=workers)
        if interval is None:
            return False
        since = slowest - self.clock
        return since >= interval or (since > 0 and last)

    @property
    def is_vital(self) -> bool:
        """Whether the run cannot begin without a first checkpoint."""
        return self._settings.recovery.remedy is Remedy.ROLL_BACK and self.saved is None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the processes and the disk must know of a run.

    Attributes:
        pickled_spec: a `WorkerSpec`, for the workers.
        first: all parameters at the start, (elements,).
        snapshots: of each shard, where the run goes on from a checkpoint.
        whole_batch: samples by which an update that is applied alone is divided; None where all of a round are.
        facts: kept in each checkpoint, to tell whether it is of this run; "model" is the signature of the model.
    """

    settings: RunSettings
    pickled_spec: bytes
    data: Any
    first: Vector
    whole_batch: int | None
    directory: Path | None
    facts: Mapping[str, Any]
    snapshots: tuple[dict[str, Vector], ...] | None = None
