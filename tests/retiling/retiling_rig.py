"""A run in the small: what every processor of a tiled run would measure, from its true speed alone.

One iteration, as in the paper: compute 1 (forward) - comm 1 (tensor-parallel sums, waits for the slowest of the replica) -
compute 2 (backward) - comm 2 (gradient sums, waits for everybody) - compute 3 (modify).
"""

import random
from dataclasses import dataclass, field
from typing import Any

from tatami.cluster import Cluster
from tatami.retiling import Controller, Decision, Retiler, Timing
from tatami.tiling import Layout, plan
from tatami.workload import Workload

FORWARD, BACKWARD, MODIFY = 0.4, 0.5, 0.1
"""Shares of the compute time of an iteration."""
NETTALK = Workload.mlp(203, 80, 26, samples=1024)


@dataclass
class Run:
    """A run that goes on iteration by iteration; `speeds` may be changed between them.

    Attributes:
        speeds: true speeds, samples x units per millisecond.
        noise: standard deviation of each iteration's compute time, as a fraction.
        overhead_s: of each of the three computations, whatever its size.
        comm_s: one exchange, without the waiting.
    """

    controller: Controller
    speeds: dict[str, float]
    noise: float = 0.0
    overhead_s: float = 0.0
    comm_s: float = 0.001
    seed: int = 0
    iteration: int = 0
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.timings: list[Timing] = []

    def checks(self, count: int) -> list[Decision]:
        """Go on until `count` more checks are done; their decisions."""
        target = len(self.decisions) + count
        while len(self.decisions) < target:
            self.iterations(1)
        return self.decisions[-count:]

    def iterations(self, count: int) -> None:
        """Go on for so many iterations, checks included."""
        for _ in range(count):
            self.iteration += 1
            self.timings += self._measure()
            if self.controller.due(self.iteration):
                self.decisions.append(self.controller.observe(self.iteration, self.timings))
                self.timings = []

    @property
    def imbalance(self) -> float:
        """Slowest over fastest compute time, free of noise."""
        times = [self._compute_s(name, work) for name, work in self._works().items()]
        return max(times) / min(times)

    def _works(self) -> dict[str, float]:
        """Of every processor: samples x units where there is one block."""
        workload = self.controller.workload
        tilings = self.controller.layout.cut_blocks(workload)
        return {
            tile.processor: workload.tile_work(
                [tiling.by_processor[tile.processor].units.size for tiling in tilings], samples=tile.samples.size
            )
            for tile in self.controller.tiling.tiles
        }

    def _compute_s(self, name: str, work: float) -> float:
        return work / self.speeds[name] / 1000 + 3 * self.overhead_s

    def _measure(self) -> list[Timing]:
        works = self._works()
        result = []
        for replica in self.controller.tiling.replicas:
            compute_s = {}
            for tile in replica:
                jitter = max(0.1, self.random.gauss(1.0, self.noise))
                compute_s[tile.processor] = self._compute_s(tile.processor, works[tile.processor]) * jitter
            ready_s = FORWARD * max(compute_s.values()) + (self.comm_s if len(replica) > 1 else 0.0)
            for tile in replica:
                own_s = compute_s[tile.processor]
                result.append(
                    Timing(
                        processor=tile.processor,
                        iteration=self.iteration,
                        t1_s=ready_s + BACKWARD * own_s,
                        t2_s=BACKWARD * own_s,
                        compute_s=own_s,
                        work=works[tile.processor],
                    )
                )
        return result


def run(speeds: list[float], *, workload: Workload = NETTALK, known: bool = False, **settings: Any) -> Run:
    """A run on processors p0, p1, ... that starts from SRPM (`known`) or from even tiles, planned in ignorance."""
    cluster = Cluster.from_speeds(speeds if known else [1.0] * len(speeds))
    layout = plan("srpm" if known else "even", cluster=cluster, workload=workload).layout
    return start(layout, cluster=cluster, speeds=speeds, workload=workload, known=known, **settings)


def start(
    layout: Layout,
    *,
    cluster: Cluster,
    speeds: list[float],
    retiler: Retiler | None = None,
    workload: Workload = NETTALK,
    known: bool = True,
    noise: float = 0.0,
    overhead_s: float = 0.0,
    seed: int = 0,
) -> Run:
    """A run that starts from `layout`, on processors of true `speeds`."""
    controller = Controller(
        retiler or Retiler(rule="settling"), cluster=cluster, workload=workload, layout=layout, known_speeds=known
    )
    names = [processor.name for processor in cluster.processors]
    return Run(
        controller=controller, speeds=dict(zip(names, speeds, strict=True)), noise=noise, overhead_s=overhead_s, seed=seed
    )
