"""How fast the ranks of an elastic run are, and which tiles would suit them better: the rule of `Retiler()`."""

from __future__ import annotations

import numpy as np

from tatami.model.model import TiledModel
from tatami.retiling import Decision, Retiler
from tatami.train.own_times import OwnTimes
from tatami.train.retiling import watcher_of

_FIRST_S = 0.2
"""What a re-tiling costs beside its rows until one was measured: all ranks stop, and form a new group."""


class SpeedWatch:
    """From one change of the members to the next; the same on all ranks.

    Args:
        model: as it lies now; some of the members may have no tile.
        times: of this rank, for the whole run: how fast it is without a tile is known by what it once was.

    Attributes:
        names: of the members, in the order of the ranks.
    """

    def __init__(self, model: TiledModel, *, times: OwnTimes) -> None:
        self.names = model.names
        self._watcher = watcher_of(model, Retiler())
        self._watcher.moved(_FIRST_S)
        self._times = times
        self._times.moved(0.0)
        self._steps = 0

    def suits(self, model: TiledModel) -> bool:
        """Whether the tiles now lie as was decided, among the same members."""
        return self.names == model.names and self._watcher.layout == model.whole_layout

    def moved(self, took_s: float) -> None:
        """The tiles lie as was decided, and that took this rank so long."""
        self._times.moved(took_s)

    def local_report(self) -> list[float]:
        """See `OwnTimes.local_report`; `apply_totals` wants its sum over all ranks."""
        return self._times.local_report(self._watcher, iteration=self._steps)

    def apply_totals(self, summed: list[float]) -> Decision | None:
        """What is to be done after one more step; None: nothing."""
        num_ranks = len(self.names)
        self._steps += 1
        if took_s := max(summed[num_ranks:]):
            self._watcher.moved(took_s)
        decision = self._watcher.take(self._steps, np.array(summed[:num_ranks]))
        return decision if decision is not None and decision.remaps else None
