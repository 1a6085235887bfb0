"""The settings of a tiled run on simulated machines."""

from __future__ import annotations

from dataclasses import dataclass, field

from tatami.cluster import Cluster, SpeedTable
from tatami.errors import PlanError, shortened
from tatami.retiling import Retiler
from tatami.sim.allreduce import Software
from tatami.sim.platforms import AbstractPlatform
from tatami.sim.tiling.changes import Change
from tatami.sim.tiling.work import NO_STARTUP, Startup
from tatami.tiling import AlphaBetaCost, Layout
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TilingJob:
    """What `rehearse` runs: processor r of the cluster on host r of the platform.

    Attributes:
        platform: links; the speeds of its hosts are not looked at.
        cluster: the processors, at the speeds that the run is planned with.
        workload: what is laid out.
        layout: how.
        iterations: how many.
        speeds: true speeds, in the order of the ranks; None: the cluster's.
        changes: of those speeds.
        retiler: None: the tiling stays.
        known_speeds: as of `tatami.retiling.Controller`.
        flop_per_s: of speed 1; None: as `AlphaBetaCost` has it.
        state_copies: tensors of the optimizer for each weight that moves: 0 for SGD, 2 for Adam.
        startup: what each tile costs beyond its area.
        software: what ranks add to the wires.
        skip: whether iterations that repeat themselves are left out.

    Raises:
        PlanError: no iteration; a processor that is not in the cluster; fewer hosts than processors.
    """

    platform: AbstractPlatform
    cluster: Cluster
    workload: Workload
    layout: Layout
    iterations: int
    speeds: tuple[float, ...] | None = None
    changes: tuple[Change, ...] = ()
    retiler: Retiler | None = None
    known_speeds: bool = True
    flop_per_s: float | None = None
    state_copies: int = 0
    startup: Startup = NO_STARTUP
    software: Software = field(default_factory=Software)
    skip: bool = True

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise PlanError(f"a tiled run has at least 1 iteration, not {self.iterations}")
        if len(self.platform.hosts) < self.cluster.size:
            raise PlanError(
                f"{self.platform.name} has {len(self.platform.hosts)} hosts for {self.cluster.size} processors; each needs one"
            )
        if self.speeds is not None and len(self.speeds) != self.cluster.size:
            raise PlanError(f"{len(self.speeds)} true speeds are given for {self.cluster.size} processors")
        for name in (*sorted(self.layout.processors), *(change.processor for change in self.changes)):
            if name not in self.cluster.by_name:
                known = shortened(", ".join(self.cluster.by_name))
                raise PlanError(f"there is no processor {name!r} in the cluster, which has {known}")

    @property
    def true_flop_per_s(self) -> dict[str, float]:
        """What each processor begins with."""
        scale = AlphaBetaCost(flop_per_s=self.flop_per_s).scale(self.cluster)
        names, speeds = self.cluster.by_name, self.speeds or tuple(self.cluster.speeds.values())
        return {
            name: speed.scaled(speed=scale) if isinstance(speed, SpeedTable) else speed * scale
            for name, speed in zip(names, speeds, strict=True)
        }
