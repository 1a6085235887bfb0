"""One rank of a lab, which probes it and then measures: `python -m rehearsal.rank JOB.json FOUND.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from paper.contestants import PaperTask, make_task
from rehearsal.setting import RankJob, job_from_dict, tilings
from tatami.bench.allreduce import ELEMENT_BYTES
from tatami.bench.interleaved import Contestant, measured, times
from tatami.clock import SystemClock
from tatami.cluster import Cluster
from tatami.comm.allreduce import AllReduce, AllReduceSpec
from tatami.comm.base import AbstractCommunicator
from tatami.comm.detect import init
from tatami.model.cluster_probe import probe
from tatami.tiling import Layout
from tatami.train import tile
from tatami.workload import Workload, net_workload, parse_net

_TIMEOUT_S = 180.0
_SHAPES = ((0.125, 0.5), (0.25, 0.25), (0.25, 0.75), (0.5, 0.25), (0.5, 0.5), (1.0, 0.125), (1.0, 0.3))
"""(height, width) of the tiles that are computed alone: fractions of the units and of the samples."""
_BLOCK_S = 0.8
"""Of one timing under a quota: many of its periods."""
_ROUNDS = 9
_MESSAGES_BYTES = (8, 128 * 1024, 256 * 1024, 512 * 1024, 1024**2, 2 * 1024**2, 4 * 1024**2)
_VECTOR_BYTES = 4 * 1024**2


class LabProbe:
    """One rank. Every method is collective."""

    def __init__(self, job: RankJob, comm: AbstractCommunicator) -> None:
        self._job = job
        self._comm = comm
        self._clock = SystemClock()
        self._workload: Workload = net_workload(job.net, samples=job.samples)
        self._task: PaperTask = make_task(parse_net(job.net), samples=job.samples, workload=self._workload, seed=0)

    def run(self) -> dict[str, Any]:
        """All that is found; of every rank, on every rank."""
        cluster = probe(self._workload, self._comm)
        found = {"cluster": _described(cluster), "sums_bytes_per_s": self._sums()}
        return found | self._messages_and_allreduces() | self._tiles_and_tilings(cluster)

    # -- calibration ------------------------------------------------------------------------------------------------------

    def _tiles(self) -> dict[tuple[int, int], Callable[[], None]]:
        """Iterations on tiles alone, by their units and samples."""
        _, hidden, _ = parse_net(self._job.net)
        shapes = [(round(height * hidden), round(width * self._job.samples)) for height, width in _SHAPES]
        return {shape: self._alone(*shape) for shape in shapes}

    def _alone(self, units: int, samples: int) -> Callable[[], None]:
        inputs, _, outputs = parse_net(self._job.net)
        model = nn.Sequential(
            nn.Linear(inputs, units, bias=False),
            nn.Sigmoid(),
            nn.Linear(units, outputs, bias=False),
            nn.Sigmoid(),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y, loss = self._task.x[:samples], self._task.y[:samples], nn.MSELoss()

        def iteration() -> None:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

        iteration()
        return iteration

    def _timed(self, run: Callable[[], object]) -> float:
        """Seconds of one, of this rank alone."""
        start_s, count, spent_s = self._clock.now_s(), 0, 0.0
        while spent_s < _BLOCK_S:
            run()
            count += 1
            spent_s = self._clock.now_s() - start_s
        return spent_s / count

    def _messages(self) -> dict[tuple[str, int], Contestant]:
        """Messages without a pause: of all to their right ("shift"), and of two and two to each other ("exchange")."""
        comm = self._comm
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        partner = comm.rank ^ 1 if comm.rank ^ 1 < comm.size else None
        found: dict[tuple[str, int], Contestant] = {}
        for size_bytes in _MESSAGES_BYTES:
            there, here = (torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2))

            def pass_on(to: int | None, by: int | None, there: torch.Tensor = there, here: torch.Tensor = here) -> None:
                if to is not None and by is not None:
                    for request in [comm.irecv(here, by), comm.isend(there, to)]:
                        request.wait()

            found["shift", size_bytes] = times(partial(pass_on, right, left))
            found["exchange", size_bytes] = times(partial(pass_on, partner, partner))
        return found

    def _sums(self) -> list[float]:
        """Of every rank: bytes a second at which it adds one vector to another, all ranks at once."""
        one, other = torch.zeros(_VECTOR_BYTES // 4), torch.zeros(_VECTOR_BYTES // 4)
        self._comm.barrier()
        return list(self._comm.allgather_object(_VECTOR_BYTES / self._timed(lambda: one.add_(other))))

    # -- what is to be predicted ------------------------------------------------------------------------------------------

    def _messages_and_allreduces(self) -> dict[str, Any]:
        """In turn, because whether long messages wait for each other is a matter of moments."""
        messages = self._messages()
        made = {
            (name, size_bytes): AllReduce(self._comm, AllReduceSpec(size=size_bytes // ELEMENT_BYTES, algorithm=name))
            for size_bytes in self._job.sizes_bytes
            for name in self._job.algorithms
        }
        contestants = messages | {case: times(each.run) for case, each in made.items()}
        timed = measured(
            {str(case): run for case, run in contestants.items()}, self._comm, rounds=_ROUNDS, seconds=_BLOCK_S / 2
        )
        for each in made.values():
            each.close()
        return {
            "messages": [{"way": way, "size_bytes": size, **timed[str((way, size))]} for way, size in messages],
            "allreduce": [{"algorithm": name, "size_bytes": size, **timed[str((name, size))]} for name, size in made],
        }

    def _tiles_and_tilings(self, cluster: Cluster) -> dict[str, Any]:
        """Blocks of iterations of all tiles alone, and of all tilings, in turn: a machine's own speed drifts within minutes."""
        layouts = tilings(cluster)
        tiles = self._tiles()
        runs = {name: self._iterations(layout, cluster) for name, layout in layouts.items()}
        tile_s: dict[tuple[int, int], list[float]] = {shape: [] for shape in tiles}
        block_s: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(self._job.rounds + 1):
            for shape, alone in tiles.items():
                self._comm.barrier()
                tile_s[shape].append(self._timed(alone))
            for name, run in runs.items():
                self._comm.barrier()
                start_s = self._clock.now_s()
                for _ in range(self._job.repeats if round_ else 1):
                    run()
                if round_:  # the first round warms up
                    block_s[name].append((self._clock.now_s() - start_s) / self._job.repeats)
        timed = self._comm.allgather_object([(*shape, median(seconds)) for shape, seconds in tile_s.items()])
        everywhere = self._comm.allgather_object(block_s)
        found = []
        for name, layout in layouts.items():
            slowest = [max(ranks) for ranks in zip(*(each[name] for each in everywhere), strict=True)]
            found.append({"tiling": name, "layout": layout.to_dict(), "median_s": median(slowest), "rounds_s": slowest})
        return {"tiles": list(timed), "tilings": found}

    def _iterations(self, layout: Layout, cluster: Cluster) -> Callable[[], None]:
        samples = self._job.samples
        model = tile(
            self._task.model, self._comm, batch_size=samples, speeds=cluster, layout=layout, reduction="mean", quiet=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = model.local(self._task.x, self._task.y)
        loss = nn.MSELoss()

        def iteration() -> None:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            model.phases.finish_iteration()

        return iteration


def _described(cluster: Cluster) -> dict[str, Any]:
    return {
        "speeds_flop_per_s": [processor.speed for processor in cluster.processors],
        "hosts": [processor.host for processor in cluster.processors],
        "links": [[*hosts, link.bandwidth_bytes_per_s, link.latency_s] for hosts, link in cluster.links.items()],
    }


def main() -> None:
    """From beginning to end."""
    job = job_from_dict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    comm = init(timeout_s=_TIMEOUT_S)
    found = LabProbe(job, comm).run()
    if comm.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    comm.barrier()


if __name__ == "__main__":
    main()
