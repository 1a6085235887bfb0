"""What one rank of a cell does:  python -m racing.rank DESCRIPTION FOUND"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils import _python_dispatch as dispatch

from paper.contestants import start_rivals
from racing.cells import Cell, cell_from_dict
from racing.contestants import LEARNING_RATE, AbstractRacer, Alone, CannotError, DataParallel, Ddp, Fsdp, Tatami, Weights
from racing.networks import make
from racing.pipelines import Pipelining
from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.comm.detect import init
from tatami.lab.pacing import Pacing
from tatami.measure.speed_curves import measure_network_curves, with_curves
from tatami.measure.speeds import at_hosts
from tatami.model.overheads import measure_messages
from tatami.partition.blocks import find_blocks, workload_of
from tatami.partition.tracing.restore_state import copy_of
from tatami.partition.tracing.sample import Sample
from tatami.tiling import Span
from tatami.workload import Workload

_TIMEOUT_S = 600.0
_LOSS_ERROR, _UPDATE_ERROR = 1e-5, 1e-3
"""What float32 allows, relative: of the loss after one step, and of that step of all weights."""
_WARM_UP = 4
"""Steps before the first that is timed. In the first ones torch lays its buckets anew, and Tatami learns the order of gradients
and checks more often than later that all ranks agree."""
_CHECKED = 8
"""Samples of that loss, where it does not depend on which are together."""
_ROUNDED = 20.0
"""So many times as much where gradients have 16 bits on the wire."""
_CORNERS = 10.0
"""The same for networks of ReLUs: a ResNet-18 whose step is off by 2e-3 is off by 5e-6 with GELUs, by 1e-14 in float64."""


class Race:
    """One rank of one cell. Every method is collective."""

    def __init__(self, cell: Cell, comm: AbstractCommunicator) -> None:
        self._cell, self._comm = cell, comm
        self._network = make(cell.network, samples=cell.samples, shape=cell.shape)
        self._references: dict[tuple[Span, ...], tuple[Weights, float]] = {}
        self._began_s = time.monotonic()

    def run(self, names: Sequence[str]) -> dict[str, Any]:
        """Measure the machines, then all contestants in turn."""
        cell, comm = self._cell, self._comm
        start_rivals(comm, interface="eth0")
        cluster = self._measured()
        self._say("machines measured")
        racers: dict[str, AbstractRacer] = {}
        lines: dict[str, dict[str, Any]] = {}
        for name in names:
            lines[name] = self._prepared(name, cluster, racers)
            self._say(f"{name}: {lines[name].get('cannot') or 'ready'}")
        speeds = [float(each.speed) for each in cluster.processors]
        own = max(1, round(cell.samples * speeds[comm.rank] / sum(speeds)))
        alone = Alone(self._network, samples=own)
        alone.step()
        for _ in range(_WARM_UP):
            for racer in racers.values():
                racer.step()
        rounds_s: dict[str, list[float]] = {name: [] for name in racers}
        late_s, cpu_s = dict.fromkeys(racers, 0.0), dict.fromkeys(racers, 0.0)
        alone_s: list[list[float]] = []
        for _ in range(cell.rounds):
            for name, racer in racers.items():
                before_s, start_s = self._late_s(), time.process_time()
                rounds_s[name].append(self._timed(racer))
                late_s[name] += self._late_s() - before_s
                cpu_s[name] += time.process_time() - start_s  # of all threads
            alone_s.append(list(comm.allgather_object(self._timed(alone) * cell.samples / own)))
        self._say("measured")
        for name in racers:
            lines[name]["rounds_s"] = [max(each) for each in zip(*comm.allgather_object(rounds_s[name]), strict=True)]
            lines[name]["late_s"] = max(comm.allgather_object(late_s[name]))
            lines[name]["cpu_s"] = sum(comm.allgather_object(cpu_s[name] / (cell.rounds * cell.repeats)))
        network = cluster.network
        return {
            "lines": lines,
            "alone_s": alone_s,
            "measured": {
                "flop_per_s": speeds,
                "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s,
                "latency_s": network.latency_s,
            },
            "parameters": sum(each.numel() for each in self._network.model.parameters()),
        }

    def _measured(self) -> Cluster:
        """As `tatami.tile(speeds="measure")` does it; once, so that the shares of all are of the same speeds."""
        network, comm = self._network, self._comm
        whole, sample, samples = copy_of(network.model), network.x[:2], self._cell.samples
        workload: Workload | None = None
        if comm.rank == 0:  # tracing is the same everywhere, and the hosts share two cores
            with self._at_full_speed():
                found = find_blocks(whole, sample=sample, random="plain", batch_size=samples)
                workload = workload_of(whole, found, samples=samples)
        workload = comm.bcast_object(workload)
        curves = measure_network_curves(whole, Sample.of(sample), comm, batch_size=samples)
        cluster = measure_messages(at_hosts(Cluster.from_speeds([1.0] * comm.size), comm), comm)
        return with_curves(cluster, curves, workload=workload)

    def _prepared(self, name: str, cluster: Cluster, racers: dict[str, AbstractRacer]) -> dict[str, Any]:
        """Make a contestant, and hold its first step against the plain network's; says why where that fails."""
        problem, racer = "", None
        try:
            racer = self._made(name, cluster)
            racer.step()
        except CannotError as error:
            problem = str(error)
        except Exception as error:  # a line of the results says what torch said
            traceback.print_exc()
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        problems = [each for each in self._comm.allgather_object(problem) if each]
        if problems:
            return {"cannot": problems[0]}
        assert racer is not None
        line = {**racer.facts(), **self._comm.bcast_object(self._checked(racer, rounded=name.endswith("float16")))}
        if "cannot" not in line:
            racers[name] = racer
        return line

    def _made(self, name: str, cluster: Cluster) -> AbstractRacer:
        network, comm = self._network, self._comm
        speeds = [float(each.speed) for each in cluster.processors]
        made: dict[str, Callable[[], AbstractRacer]] = {
            "data-parallel": lambda: DataParallel(network, comm, speeds=speeds),
            "fsdp": lambda: Fsdp(network, comm, speeds=speeds),
            "pipelining": lambda: Pipelining(network, comm, cluster=cluster),
        }
        if name in made:
            return made[name]()
        if name.startswith("ddp"):
            return Ddp(name, network, comm, speeds=speeds)
        with self._at_full_speed():  # it traces and tests the network
            return Tatami(name, network, comm, cluster=cluster)

    def _checked(self, racer: AbstractRacer, *, rounded: bool) -> dict[str, Any]:
        """How far the weights are from the plain network's after one step of the same samples."""
        weights = racer.weights()
        if self._comm.rank != 0:
            return {}
        with self._at_full_speed(), torch.no_grad():
            # Only batch normalization makes a difference between a batch at once and in parts.
            whole = [Span(0, self._cell.samples)]
            parts = [span for span in racer.statistics if span.size] if self._network.batch_norm else whole
            expected, expected_loss = self._reference(tuple(parts))
            before = dict(self._network.model.named_parameters())
            moved = sum(float((expected[name] - each).double().square().sum()) for name, each in before.items()) ** 0.5
            off = sum(float((expected[name] - weights[name]).double().square().sum()) for name in before) ** 0.5
            loss = self._loss(weights, parts)
        errors = {"update_error": off / moved, "loss_error": abs(loss - expected_loss) / abs(expected_loss)}
        times = _ROUNDED if rounded else _CORNERS if self._network.corners else 1.0
        if not (errors["update_error"] <= times * _UPDATE_ERROR and errors["loss_error"] <= times * _LOSS_ERROR):
            told = ", ".join(f"{name} {value:.2g}" for name, value in errors.items())
            return {**errors, "cannot": f"another training than the plain network's: after one step {told}"}
        return errors

    def _reference(self, parts: tuple[Span, ...]) -> tuple[Weights, float]:
        """The plain network's weights after one step, and the loss with them."""
        if parts not in self._references:
            network, model = self._network, copy_of(self._network.model)
            with torch.enable_grad():
                for span in parts:
                    x, y = network.x[span.slice()], network.y[span.slice()]
                    torch.autograd.backward(network.loss(model(x), y) * (span.size / self._cell.samples))
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
            weights = {name: each.detach() for name, each in model.named_parameters()}
            self._references[parts] = weights, self._loss(weights, parts)
        return self._references[parts]

    def _loss(self, weights: Weights, parts: Sequence[Span]) -> float:
        network, model = self._network, copy_of(self._network.model)
        model.load_state_dict(weights, strict=False)
        total = 0.0
        for span in parts if network.batch_norm else [Span(0, min(_CHECKED, self._cell.samples))]:
            loss = network.loss(model(network.x[span.slice()]), network.y[span.slice()])
            total += float(loss) * span.size
        return total

    def _timed(self, racer: AbstractRacer) -> float:
        self._comm.barrier()
        start_s = time.monotonic()
        for _ in range(self._cell.repeats):
            racer.step()
        return (time.monotonic() - start_s) / self._cell.repeats

    def _late_s(self) -> float:
        """By how much this machine was slower than the host so far."""
        mode = dispatch._get_current_dispatch_mode()
        return mode.late_s if isinstance(mode, Pacing) else 0.0

    def _at_full_speed(self) -> AbstractContextManager[Any]:
        """Without the model of the host: what only checks."""
        return dispatch._disable_current_modes() if self._cell.flop_per_s else nullcontext()

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f"  {time.monotonic() - self._began_s:5.1f} s  {text}", file=sys.stderr, flush=True)


def main(description: Path, found: Path) -> None:
    """One rank of the lab; rank 0 writes what was found."""
    values = json.loads(description.read_text(encoding="utf-8"))
    comm = init(timeout_s=_TIMEOUT_S)
    result = Race(cell_from_dict(values["cell"]), comm).run(values["contestants"])
    if comm.rank == 0:
        found.write_text(json.dumps(result), encoding="utf-8")
    comm.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
