"""The test beds of held-out tilings, and one rank of them: `python -m rehearsal.heldout BED.json FOUND.json`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, fsum
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from paper.contestants import make_task
from tatami.clock import SystemClock
from tatami.cluster import Cluster, Link, Processor
from tatami.cluster.toml import cluster_toml
from tatami.comm.base import AbstractCommunicator
from tatami.comm.detect import init
from tatami.model.cluster_probe import probe
from tatami.tiling import Layout, Replica
from tatami.train import measure_speeds, tile
from tatami.workload import as_probed, net_workload, parse_net

_TIMEOUT_S = 180.0
_REPEAT_S = 0.25
"""As `tatami probe` times speeds."""
_OFF = 0.15
"""Heights and widths stray so far from what the speeds ask for."""
_GIGABIT = 125e6
_TEN_BLOCKS = "64" + "-256-64" * 10
_TOGETHER_FLOP_PER_S = 36e9
"""Paced hosts compute so much all together, in the time of this machine, which two cores can."""


@dataclass(frozen=True, kw_only=True)
class HeldOutBed:
    """One lab.

    Attributes:
        name: for records.
        speeds: of the hosts, relative; one rank on each.
        net, samples: what is trained.
        bandwidth_bytes_per_s: of all links.
        tilings: how many are measured.
        seed: of them.
        rounds, block_s: blocks of every tiling, in turn, and how long one lasts at least.
        slower: how many times as long a paced lab takes as its hosts together ask for: iterations of milliseconds need it.
        flop_per_s: of a paced host of speed 1; None: hosts have parts of a core.
    """

    name: str
    speeds: tuple[float, ...]
    net: str
    samples: int
    bandwidth_bytes_per_s: float = _GIGABIT
    tilings: int = 8
    seed: int = 0
    rounds: int = 5
    block_s: float = 1.0
    slower: int = 1
    flop_per_s: float | None = None

    @property
    def cluster(self) -> Cluster:
        """As the lab is asked for it."""
        unit = self.flop_per_s or 1.0
        return Cluster(
            processors=tuple(Processor(name=f"p{i}", speed=speed * unit, host=f"h{i}") for i, speed in enumerate(self.speeds)),
            network=Link(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=50e-6),
        )

    @property
    def dilation(self) -> float:
        """How many times as long all takes in the lab: 1 where hosts have parts of a core."""
        if self.flop_per_s is None:
            return 1.0
        return float(self.slower * ceil(fsum(self.speeds) * self.flop_per_s / _TOGETHER_FLOP_PER_S))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `bed_from_dict` reads it back."""
        return asdict(self)

    def with_tilings(self, tilings: int, *, flop_per_s: float | None = None) -> HeldOutBed:
        """So many of them, on hosts that are paced where it is said how fast one of speed 1 is."""
        return replace(self, tilings=tilings, flop_per_s=flop_per_s)


BEDS = (
    HeldOutBed(name="small A5", speeds=(0.25, 0.31, 0.63, 1.0, 1.0), net="203-80-26", samples=1024, slower=3),
    HeldOutBed(
        name="small B4", speeds=(0.63, 0.63, 0.63, 1.0), net="203-80-26", samples=1024, bandwidth_bytes_per_s=12.5e6, slower=3
    ),
    HeldOutBed(name="ten blocks 4", speeds=(1.0, 0.5, 0.7, 0.4), net=_TEN_BLOCKS, samples=4096),
    HeldOutBed(name="ten blocks 3", speeds=(0.9, 0.3, 0.6), net=_TEN_BLOCKS, samples=2048, bandwidth_bytes_per_s=25e6),
    HeldOutBed(name="wide 6", speeds=(0.3, 0.3, 0.5, 0.5, 0.8, 0.8), net="128-1600-64", samples=8192),
    HeldOutBed(name="wide 3", speeds=(1.0, 0.45, 0.2), net="512-1024-10", samples=4096, bandwidth_bytes_per_s=12.5e6),
    HeldOutBed(name="deep 5", speeds=(0.5, 1.0, 0.35, 0.6, 0.8), net="100-400-100-400-30", samples=8192),
    HeldOutBed(name="deep 7", speeds=(0.4, 0.5, 0.3, 0.6, 0.7, 0.4, 0.5), net="300-600-50", samples=16384),
)


def bed_from_dict(values: Mapping[str, Any]) -> HeldOutBed:
    """What `HeldOutBed.to_dict` wrote."""
    return HeldOutBed(**{**values, "speeds": tuple(values["speeds"])})


def drawn_layouts(bed: HeldOutBed) -> list[Layout]:
    """Any replicas of the processors in any order, the first one row and the second one replica."""
    draw = random.Random(bed.seed)
    names = [f"p{i}" for i in range(len(bed.speeds))]
    speed = dict(zip(names, bed.speeds, strict=True))
    layouts = []
    for number in range(bed.tilings):
        order = draw.sample(names, len(names))
        ends = [{0: True, 1: False}.get(number, draw.random() < 0.5) for _ in order[1:]]
        replicas = [[order[0]]]
        for name, fresh in zip(order[1:], ends, strict=True):
            if fresh:
                replicas.append([name])
            else:
                replicas[-1].append(name)
        weight = {name: speed[name] * (1 + draw.uniform(-_OFF, _OFF)) for name in names}
        total = fsum(weight.values())
        layouts.append(
            Layout(
                replicas=tuple(
                    Replica(
                        width=fsum(weight[name] for name in replica) / total,
                        processors=tuple(replica),
                        heights=tuple(weight[name] / fsum(weight[each] for each in replica) for name in replica),
                    )
                    for replica in replicas
                )
            )
        )
    return layouts


def found_by(bed: HeldOutBed, comm: AbstractCommunicator) -> dict[str, Any]:
    """Probe, then measure blocks of iterations of all tilings in turn. Collective; the same on every rank.

    The machine itself becomes faster and slower by 10 to 20 % within minutes. Therefore speeds are timed again before each
    round, as the probe times them, and the median of all counts.
    """
    workload = net_workload(bed.net, samples=bed.samples)
    task = make_task(parse_net(bed.net), samples=bed.samples, workload=workload, seed=0)
    cluster = probe(workload, comm, net=bed.net)
    layouts, clock = drawn_layouts(bed), SystemClock()
    steps = [_step(layout, cluster, task, comm) for layout in layouts]
    block_s: list[list[float]] = [[] for _ in layouts]
    speeds = [[each.speed for each in cluster.processors]]
    repeats = [1] * len(layouts)
    for round_ in range(bed.rounds + 2):  # the first warms up, the second tells how often is long enough
        if round_ > 1:
            timed = measure_speeds(as_probed(workload, cluster), comm, repeats=3, repeat_s=_REPEAT_S)
            speeds.append([each.flop_per_s for each in timed])
        for index, step in enumerate(steps):
            comm.barrier()
            start_s = clock.now_s()
            for _ in range(repeats[index]):
                step()
            spent_s = (clock.now_s() - start_s) / repeats[index]
            if round_ == 1:
                repeats[index] = comm.bcast_object(max(1, ceil(bed.block_s / spent_s)))
            elif round_ > 1:
                block_s[index].append(spent_s)
    everywhere = comm.allgather_object(block_s)
    medians = map(median, zip(*speeds, strict=True))
    processors = tuple(replace(each, speed=speed) for each, speed in zip(cluster.processors, medians, strict=True))
    return {
        "cluster": cluster_toml(replace(cluster, processors=processors)),
        "speeds": speeds,
        "tilings": [
            {
                "layout": layout.to_dict(),
                "rounds_s": [max(ranks) for ranks in zip(*(each[index] for each in everywhere), strict=True)],
            }
            for index, layout in enumerate(layouts)
        ],
    }


def _step(layout: Layout, cluster: Cluster, task: Any, comm: AbstractCommunicator) -> Callable[[], None]:
    samples = len(task.x)
    model = tile(task.model, comm, batch_size=samples, speeds=cluster, layout=layout, reduction="mean", quiet=True)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()

    def step() -> None:
        x, y = model.local(task.x, task.y)
        optimizer.zero_grad()
        torch.autograd.backward(loss(model(x), y))
        optimizer.step()

    return step


def main() -> None:
    """Measure what the bed says; rank 0 writes what was found."""
    bed = bed_from_dict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    comm = init(timeout_s=_TIMEOUT_S)
    found = found_by(bed, comm)
    if comm.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
