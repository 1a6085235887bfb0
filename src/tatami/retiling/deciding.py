"""What all that decide about re-tiling have in common: the machines, what is laid out on them, and how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.retiling.decision import Decision
from tatami.retiling.retiler import Retiler
from tatami.retiling.timing import Timing
from tatami.tiling import Layout, Tiling
from tatami.workload import Workload


class AbstractDecider(ABC):
    """Timings in, decisions out: the same on every rank, bit for bit, so that nothing else need be agreed upon.

    Attributes:
        layout: the one in force.
    """

    def __init__(
        self, retiler: Retiler, *, cluster: Cluster, workload: Workload, layout: Layout, known_speeds: bool = False
    ) -> None:
        """Start from `layout`.

        Args:
            retiler: the settings.
            cluster: all processors; their speeds count where `known_speeds`, and for who is never measured.
            workload: what is laid out.
            layout: the layout in force; may leave processors out.
            known_speeds: whether `layout` was planned from speeds; `retiler.known_speeds` overrides it.

        Raises:
            PlanError: the layout has a processor that the cluster has not.
        """
        strangers = sorted(set(layout.processors) - set(cluster.by_name))
        if strangers:
            raise PlanError(f"the layout has {', '.join(strangers)}, but the cluster only {', '.join(cluster.by_name)}")
        self.retiler = retiler
        self.cluster = cluster
        self.workload = workload
        self.layout = layout
        self._known_speeds = known_speeds if retiler.known_speeds is None else retiler.known_speeds
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Set up what this rule keeps from one look to the next; called once, when all else is known."""

    @property
    def tiling(self) -> Tiling:
        """The layout in force, cut for the workload."""
        return self.layout.cut(samples=self.workload.samples, units=self.workload.units)

    def due(self, iteration: int) -> bool:
        """Whether timings are wanted after this iteration."""
        return self.retiler.due(iteration)

    @abstractmethod
    def observe(self, iteration: int, timings: Iterable[Timing]) -> Decision | None:
        """Take times; None where there is nothing to say.

        Args:
            iteration: the last one that was completed, from 1. A re-tiling takes effect after it.
            timings: of every processor that has a tile, in any order.

        Raises:
            PlanError: a timing of a processor that the cluster has not.
        """

    def _check_known(self, timing: Timing) -> None:
        if timing.processor not in self.cluster.by_name:
            raise PlanError(
                f"a timing of {timing.processor!r} in iteration {timing.iteration}, but the cluster only has "
                f"{', '.join(self.cluster.by_name)}"
            )
