"""What a rank tells the others of its speed: of its own compute, or of a product now and then where it has no tile."""

from __future__ import annotations

from typing import final

import torch

from tatami.model.model import TiledModel
from tatami.retiling import StagedWatcher, Watcher
from tatami.retiling.timing import PROBE_EVERY
from tatami.runtime.stopwatch import AbstractStopwatch

_PROBE_SIZE = 256
_MOST_PROBING = 0.1
"""Largest fraction of the time spent probing: a probe by a rank that has almost stopped may outlast the others."""


@final
class OwnTimes:
    """The times of one rank, for as long as it trains `model`."""

    def __init__(self, model: TiledModel) -> None:
        self._model = model
        self._probe = _Probe(model.phases.stopwatch, model.device)
        self._computed_s = model.phases.computed_s
        self._moved_s = 0.0
        self._looks_again_s = 0.0

    def moved(self, took_s: float) -> None:
        """A re-tiling took this rank so long, and is done: what it computed until now does not count."""
        self._moved_s, self._computed_s = took_s, self._model.phases.computed_s

    def local_report(self, watcher: Watcher | StagedWatcher, *, iteration: int) -> list[float]:
        """This rank's part of a table that all ranks sum: for each rank two numbers, of which others have 0.

        They are its compute time since the last call, per work or, with stages, per predicted second; and how long the last
        re-tiling took it. A rank without a tile
        looks how fast it is in its first iteration as such, and then in every `PROBE_EVERY`th, while the others compute, unless
        that would take it a large part of the time.
        """
        model = self._model
        rank, size = model.comm.rank, len(model.names)
        computed_s = model.phases.computed_s - self._computed_s
        table = [0.0] * (2 * size)
        if isinstance(watcher, StagedWatcher):
            work = watcher.works.get(model.name, 0.0) * model.local_span_size[1] / watcher.workload.samples
        else:
            work = model.local_work
        if work > 0:
            table[rank] = computed_s / work
        elif (
            isinstance(watcher, Watcher) and model.tile is None and (iteration % PROBE_EVERY == 0 or not self._probe.has_looked)
        ):
            table[rank] = self._look(watcher.per_work_s(model.name))
        table[size + rank] = self._moved_s
        self.moved(0.0)
        return table

    def _look(self, known_s: float) -> float:
        clock = self._model.phases.clock
        began_s = clock.now_s()
        if began_s < self._looks_again_s:
            return 0.0
        per_work_s = self._probe.per_work_s(known_s)
        ended_s = clock.now_s()
        self._looks_again_s = ended_s + (ended_s - began_s) / _MOST_PROBING
        return per_work_s


@final
class _Probe:
    """How fast a rank is without a tile, by a matrix product: it was as slow as it was known to be when it first looked."""

    def __init__(self, stopwatch: AbstractStopwatch, device: torch.device) -> None:
        self._stopwatch = stopwatch
        self._matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=torch.float32, device=device)
        self._first: tuple[float, float] | None = None

    @property
    def has_looked(self) -> bool:
        """Whether the first look is done."""
        return self._first is not None

    def per_work_s(self, known_s: float) -> float:
        """Seconds per work; `known_s` is what the first look is taken for. 0 as long as that is not known."""
        if self._first is None and not known_s > 0:
            return 0.0
        took_s = min(self._time_s() for _ in range(3))
        if self._first is None:
            self._first = took_s, known_s
        first_s, then_s = self._first
        return then_s * took_s / first_s if first_s > 0 else then_s

    def _time_s(self) -> float:
        began = self._stopwatch.mark()
        self._matrix @ self._matrix
        return self._stopwatch.between_s(began, self._stopwatch.mark())
