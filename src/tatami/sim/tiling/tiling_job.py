"""The settings of a tiled run on simulated machines."""

from __future__ import annotations

from dataclasses import dataclass, field

from tatami.cluster import Cluster, SpeedTable
from tatami.errors import PlanError
from tatami.retiling import Retiler
from tatami.sim.allreduce import Software
from tatami.sim.platforms import AbstractPlatform
from tatami.sim.tiling.changes import Change
from tatami.sim.tiling.work import NO_STARTUP, Startup
from tatami.tiling import AlphaBetaCost, Layout, Tiling
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TilingJob:
    """What `rehearse` runs: processor r of the cluster on host r of the platform.

    Attributes:
        platform: links; the speeds of its hosts are not looked at.
        cluster: the processors, at the speeds that the run is planned with.
        workload: what is laid out.
        layout: how; or
        tilings: the tiles themselves, one tiling for each block (not together with a retiler).
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
        PlanError: no layout and no tilings, or both; a processor that is not in the cluster; fewer hosts
            than processors.
    """

    platform: AbstractPlatform
    cluster: Cluster
    workload: Workload
    iterations: int
    layout: Layout | None = None
    tilings: tuple[Tiling, ...] | None = None
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
        if (self.layout is None) == (self.tilings is None):
            raise PlanError("a tiled run needs either a layout or tilings, and not both")
        if self.tilings is not None and (self.retiler or not self.tilings or len(self.tilings) != len(self.workload.blocks)):
            raise PlanError("tilings are one for each block of the workload, and are not re-tiled: give a layout for that")
        if self.iterations < 1:
            raise PlanError(f"a tiled run has at least 1 iteration, not {self.iterations}")
        if len(self.platform.hosts) < self.cluster.size:
            raise PlanError(
                f"{self.platform.name} has {len(self.platform.hosts)} hosts for {self.cluster.size} processors; each needs one"
            )
        if self.speeds is not None and len(self.speeds) != self.cluster.size:
            raise PlanError(f"{len(self.speeds)} true speeds are given for {self.cluster.size} processors")
        placed = {tile.processor for tile in self.first_tiling.tiles}
        for name in [*sorted(placed), *(change.processor for change in self.changes)]:
            if name not in self.cluster.by_name:
                raise PlanError(f"there is no processor {name!r} in the cluster, which has {', '.join(self._some_names)}")

    @property
    def first_tilings(self) -> tuple[Tiling, ...]:
        """What the run begins with."""
        if self.tilings is not None:
            return self.tilings
        assert self.layout is not None
        return self.layout.cut_blocks(self.workload)

    @property
    def first_tiling(self) -> Tiling:
        """The same for the block that has most units; of one unit where there is no block."""
        if self.tilings is not None:
            return max(self.tilings, key=lambda tiling: tiling.units)
        assert self.layout is not None
        return self.layout.cut(samples=self.workload.samples, units=self.workload.units)

    @property
    def true_flop_per_s(self) -> dict[str, float]:
        """What each processor begins with."""
        scale = AlphaBetaCost(flop_per_s=self.flop_per_s).scale(self.cluster)
        names = [processor.name for processor in self.cluster.processors]
        speeds = self.speeds or tuple(self.cluster.speeds.values())
        return {
            name: speed.scaled(speed=scale) if isinstance(speed, SpeedTable) else speed * scale
            for name, speed in zip(names, speeds, strict=True)
        }

    @property
    def _some_names(self) -> list[str]:
        names = [processor.name for processor in self.cluster.processors]
        return names if len(names) <= 8 else [*names[:8], "..."]
