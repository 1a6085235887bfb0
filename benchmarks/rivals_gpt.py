"""A GPT on unlike hosts against DistributedDataParallel, in a lab:  python benchmarks/rivals_gpt.py [OPTIONS]

    --width 384 --tokens 16 --samples 16 --bandwidth 12.5e6     another network, batch or links
    --contestants tatami,ddp-weighted                           only some of them
    --speeds 1,1,0.5,0.5                                        other hosts
    --paced 45e9 --dilate 3                                     a paced lab: hosts of speed 1 compute so many flop/s
    --contestants tatami,pipelining-3.3.1.1-8                   torch's pipeline, layers of each rank and micro-batches by hand

Eight hosts of the paper's condition A, one rank on each. Tatami (the layout of least predicted time, from speeds and links that
the ranks measure first; `tatami-flat`: without pipeline stages; `tatami-m8`: in so many micro-batches) and DDP over gloo (equal
batches; batches in proportion to the same speeds, correctly averaged; both with and without bfloat16 on the wire) take turns in
the same processes, and after each round all ranks train their weighted share alone, for gamma. Adds a line for each contestant
to `benchmarks/results/rivals_gpt.jsonl`. Needs Linux and root (docs/lab.md), and a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from elsewhere import of_ranks
from paper.contestants import start_rivals
from paper.setting import CONDITIONS
from tatami.bench.interleaved import machine
from tatami.cli.tasks import CharacterGpt, NextTokenLoss
from tatami.clock import SystemClock
from tatami.cluster import Cluster, Link, Processor
from tatami.comm.base import AbstractCommunicator
from tatami.comm.detect import init
from tatami.errors import LabError
from tatami.lab import Lab
from tatami.measure.speed_curves import measure_network_curves, with_curves
from tatami.model.cluster_probe import probe
from tatami.partition.tracing.sample import Sample
from tatami.report import EfficiencyRound, efficiency
from tatami.retiling import Retiler
from tatami.runtime.phases import PhaseTimes
from tatami.tiling import AlphaBetaCost, largest_remainder, plan, spans
from tatami.train import TiledModel, tile
from tatami.train.retiling import Retiling
from tatami.workload import Workload, gpt_workload

RESULTS = Path(__file__).parent / "results" / "rivals_gpt.jsonl"
CONTESTANTS = ("tatami", "tatami-retiled", "tatami-bfloat16", "ddp", "ddp-weighted", "ddp-weighted-float16")
_CHARACTERS = 96
_TIMEOUT_S = 600.0
_LEARNING_RATE = 1e-3
Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class GptRace:
    """What is trained, on what, and how often.

    Attributes:
        layers, width, heads, tokens: of the GPT.
        samples: sequences of the global batch.
        bandwidth_bytes_per_s: of all links.
        contestants: of `CONTESTANTS`.
        settle: iterations that a contestant that re-tiles has before it is measured.
        rounds, repeats: blocks of each contestant, in turn, and iterations of a block.
        speeds: of the hosts, relative.
        flop_per_s: of a host of speed 1 in a paced lab; None: hosts have parts of a core.
        dilation: how many times as long all takes there.
    """

    layers: int
    width: int
    heads: int
    tokens: int
    samples: int
    bandwidth_bytes_per_s: float
    contestants: tuple[str, ...]
    settle: int
    rounds: int
    repeats: int
    speeds: tuple[float, ...]
    flop_per_s: float | None = None
    dilation: float = 1.0

    @property
    def cluster(self) -> Cluster:
        """As the lab is asked for it."""
        unit = self.flop_per_s or 1.0
        processors = tuple(Processor(name=f"p{i}", speed=speed * unit, host=f"h{i}") for i, speed in enumerate(self.speeds))
        return Cluster(processors=processors, network=Link(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=50e-6))


class Racing:
    """One rank. Every method is collective."""

    def __init__(self, race: GptRace, comm: AbstractCommunicator) -> None:
        self._race, self._comm, self._clock = race, comm, SystemClock()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._model = CharacterGpt(
                characters=_CHARACTERS, layers=race.layers, width=race.width, heads=race.heads, tokens=race.tokens
            )
        shape = (race.samples, race.tokens)
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randint(0, _CHARACTERS, shape, generator=generator)
        self._y = torch.randint(0, _CHARACTERS, shape, generator=generator)
        self._loss = NextTokenLoss()
        self._models: dict[str, TiledModel] = {}
        self._spent: dict[str, list[PhaseTimes]] = {}
        self._workload: Workload = gpt_workload(
            layers=race.layers, width=race.width, heads=race.heads, tokens=race.tokens, samples=race.samples,
            vocabulary=_CHARACTERS, tied=False,
        )  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Measure the machines, then all contestants in turn."""
        race, comm = self._race, self._comm
        cluster = self._measured()
        shares = _shares([each.speed for each in cluster.processors], samples=race.samples)
        start_rivals(comm, interface="eth0")
        contestants = {name: self._made(name, cluster) for name in race.contestants}
        alone = self._alone(max(shares[comm.rank], 1))
        for name, step in {**contestants, "alone": alone}.items():
            comm.barrier()
            for _ in range(race.settle if name.endswith("retiled") else 2):
                step()
        self._spent.clear()
        block_s: dict[str, list[float]] = {name: [] for name in contestants}
        cpu_s: dict[str, list[float]] = {name: [] for name in contestants}
        alone_s: list[list[float]] = []
        for _ in range(race.rounds):
            for name, step in contestants.items():
                start_s = time.process_time()  # of all threads
                block_s[name].append(self._timed(step, race.repeats))
                cpu_s[name].append((time.process_time() - start_s) / race.repeats)
            mine = self._timed(alone, race.repeats) * race.samples / max(shares[comm.rank], 1)
            alone_s.append(list(comm.allgather_object(mine)))
        rounds_s = {
            name: [max(each) for each in zip(*comm.allgather_object(block_s[name]), strict=True)] for name in contestants
        }
        return {
            "speeds_flop_per_s": [each.speed for each in cluster.processors],
            "shares": shares,
            "rounds_s": rounds_s,
            "alone_s": alone_s,
            "cpu_s": {name: comm.allgather_object(fmean(each)) for name, each in cpu_s.items()},
            "phases_s": {name: comm.allgather_object(_mean(spent)) for name, spent in self._spent.items()},
            "replicas_of": {
                name: [len(each.processors) for each in model.layout.replicas] for name, model in self._models.items()
            },
            "stages_of": {name: _stages(model) for name, model in self._models.items()},
            **self._foretold(cluster),
        }

    def _measured(self) -> Cluster:
        """Links and messages as `tatami probe` finds them, speeds of the network itself as `tile` does."""
        comm, race = self._comm, self._race
        found = probe(Workload.mlp(256, 512, 256, samples=512), comm, repeats=3)
        curves = measure_network_curves(self._model, Sample.of(self._x[:2]), comm, batch_size=race.samples)
        return with_curves(found, curves, workload=self._workload)

    def _foretold(self, cluster: Cluster) -> dict[str, Any]:
        found = plan("timed", cluster=cluster, workload=self._workload)
        weighted = plan("weighted", cluster=cluster, workload=self._workload)
        price = AlphaBetaCost().price(found.layout, cluster=cluster, workload=self._workload)
        return {
            "replicas": [len(replica.processors) for replica in found.layout.replicas],
            "planned_s": price.total,
            "planned_parts_s": {
                "compute": price.compute,
                "tensor_parallel": price.tensor_parallel,
                "gradients": price.gradients,
            },
            "planned_weighted_s": weighted.predicted_s,
        }

    def _timed(self, step: Step, repeats: int) -> float:
        self._comm.barrier()
        start_s = self._clock.now_s()
        for _ in range(repeats):
            step()
        return (self._clock.now_s() - start_s) / repeats

    def _made(self, name: str, cluster: Cluster) -> Step:
        if name.startswith("pipelining"):
            return self._pipelining(name)
        return self._tiled(name, cluster) if name.startswith("tatami") else self._ddp(name, cluster)

    def _tiled(self, name: str, cluster: Cluster) -> Step:
        wire = "bfloat16" if name.endswith("bfloat16") else None
        model: TiledModel = tile(
            self._model, self._comm, batch_size=self._race.samples, sample=self._x[:2], speeds=cluster, reduction="mean",
            wire=wire, quiet=not name.startswith("tatami"), micro_batches=int(name.split("-m")[1]) if "-m" in name else None,
            stages=1 if name.endswith(("flat", "retiled")) else None,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        retiling = Retiling(model, optimizer, retiler=Retiler()) if name.endswith("retiled") else None
        self._models[name] = model

        def step() -> None:
            x, y = model.local(self._x, self._y)
            optimizer.zero_grad()
            for x_part, y_part in model.parts((x, y)):
                torch.autograd.backward(self._loss(model(x_part), y_part))
            optimizer.step()
            spent = model.phases.finish_iteration()
            self._spent.setdefault(name, []).append(spent)
            if retiling is not None:
                retiling.record(spent)

        return step

    def _ddp(self, name: str, cluster: Cluster) -> Step:
        samples = self._race.samples
        weights = [each.speed if "weighted" in name else 1.0 for each in cluster.processors]
        span = spans(_shares(weights, samples=samples))[self._comm.rank]
        x, y = self._x[span.slice()].clone(), self._y[span.slice()].clone()
        if not span.size:  # DDP has no rank without samples: it takes one whose gradient counts nothing
            x, y = self._x[:1].clone(), self._y[:1].clone()
        scale = span.size * self._comm.size / samples
        model = nn.parallel.DistributedDataParallel(self._own())
        if name.endswith("float16"):
            model.register_comm_hook(None, fp16_compress_hook)  # torch has its bfloat16 hook for NCCL only
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(self._loss(model(x), y) * scale)
            optimizer.step()

        return step

    def _pipelining(self, name: str) -> Step:
        """`torch.distributed.pipelining`, one forward and one backward pass in turn; `name` ends in the layers of each rank and
        the number of micro-batches."""
        _, layers, micro_batches = name.split("-")
        sizes, rank = [int(each) for each in layers.split(".")], self._comm.rank
        last = len(sizes) - 1
        whole = self._own()
        assert isinstance(whole, CharacterGpt)
        part = _PipelinePart(whole, first=sum(sizes[:rank]), count=sizes[rank], is_first=rank == 0, is_last=rank == last)
        stage = PipelineStage(part, rank, len(sizes), torch.device("cpu"))
        schedule = Schedule1F1B(stage, int(micro_batches), loss_fn=self._loss)
        has_none = [torch.zeros(())]  # a rank of no layers, which the optimizer would refuse
        optimizer = torch.optim.SGD([*part.parameters()] or has_none, lr=_LEARNING_RATE)

        def step() -> None:
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(self._x)
            elif rank == last:
                schedule.step(target=self._y)
            else:
                schedule.step()
            optimizer.step()

        return step

    def _alone(self, samples: int) -> Step:
        """The whole network on this rank's weighted share of the batch."""
        model = self._own()
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(self._loss(model(self._x[:samples]), self._y[:samples]))
            optimizer.step()

        return step

    def _own(self) -> nn.Module:
        own = CharacterGpt(
            characters=_CHARACTERS, layers=self._race.layers, width=self._race.width, heads=self._race.heads,
            tokens=self._race.tokens,
        )  # fmt: skip
        own.load_state_dict(self._model.state_dict())
        return own


class _PipelinePart(nn.Module):
    """Consecutive layers of a network, with its embeddings in front or its head behind."""

    def __init__(self, whole: CharacterGpt, *, first: int, count: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        layers = list(whole.layers)
        self.layers = nn.Sequential(*layers[first : first + count + (1 if is_last else 0)])
        self.characters = whole.characters if is_first else None
        self.places = whole.places if is_first else None
        self.head = whole.head if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.characters is not None and self.places is not None:
            x = self.characters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        x = self.layers(x)
        return x if self.head is None else self.head(x)


def _mean(spent: Sequence[PhaseTimes]) -> dict[str, float]:
    return {key: fmean(getattr(each, key) for each in spent) for key in ("compute_s", "tensor_parallel_s", "gradients_s")}


def _stages(model: TiledModel) -> dict[str, Any] | None:
    return None if model.stage is None else model.stage.layout.to_dict()


def _shares(weights: Sequence[float], *, samples: int) -> Sequence[int]:
    """Samples for each, in proportion."""
    total = sum(weights)
    return largest_remainder([weight / total for weight in weights], total=samples)


def records(race: GptRace, found: Mapping[str, Any], *, command: str) -> list[dict[str, Any]]:
    """A line for each contestant: its seconds, gamma, and how often it is as fast as each of the others."""
    medians = {name: median(rounds) for name, rounds in found["rounds_s"].items()}
    lines = []
    for name, rounds_s in found["rounds_s"].items():
        rounds = [EfficiencyRound(iteration_s=s, alone_s=tuple(a)) for s, a in zip(rounds_s, found["alone_s"], strict=True)]
        result = efficiency(rounds)
        lines.append(
            {
                "contestant": name,
                **asdict(race),
                "iteration_s": medians[name],
                "rounds_s": rounds_s,
                "spread": (max(rounds_s) - min(rounds_s)) / medians[name],
                "times_as_fast_as": {other: medians[other] / medians[name] for other in medians if other != name},
                "gamma": None if result.problem else result.gamma,
                "gamma_spread": result.spread,
                "gamma_problem": result.problem,
                **{key: found[key] for key in found if key not in ("rounds_s", "alone_s")},
                "command": command,
                "machine": machine(),
            }
        )
    return lines


def measured(race: GptRace, *, timeout_s: float) -> dict[str, Any]:
    """What the ranks of one lab find."""
    with tempfile.TemporaryDirectory(prefix="tatami-gpt-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")  # it is probed
        description, found = Path(folder) / "race.json", Path(folder) / "found.json"
        description.write_text(json.dumps(asdict(race)), encoding="utf-8")
        with Lab(race.cluster, paced=race.flop_per_s is not None, dilation=race.dilation) as lab:
            code = lab.run(
                ["-m", "rivals_gpt", "--rank", str(description), str(found)],
                environment={**of_ranks(preload=("rivals_gpt", "torch.export")), "GLOO_SOCKET_IFNAME": "eth0"},
                timeout_s=timeout_s,
            )
        if code != 0:
            raise LabError(f"the ranks ended with exit code {code}; what they said is above")
        result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        return result


def as_rank(description: Path, found: Path) -> None:
    """One rank of the lab; rank 0 writes what was found."""
    values = json.loads(description.read_text(encoding="utf-8"))
    race = GptRace(**{**values, "contestants": tuple(values["contestants"]), "speeds": tuple(values["speeds"])})
    comm = init(timeout_s=_TIMEOUT_S)
    result = Racing(race, comm).run()
    if comm.rank == 0:
        found.write_text(json.dumps(result), encoding="utf-8")
    comm.barrier()
    torch.distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Race, tell, and keep."""
    options = _options(arguments)
    if options.rank:
        as_rank(*options.rank)
        return
    race = GptRace(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        tokens=options.tokens,
        samples=options.samples,
        bandwidth_bytes_per_s=options.bandwidth,
        contestants=tuple(options.contestants.split(",")),
        settle=options.settle,
        rounds=options.rounds,
        repeats=options.repeats,
        speeds=tuple(map(float, options.speeds.split(","))) if options.speeds else CONDITIONS["A"],
        flop_per_s=options.paced,
        dilation=options.dilate,
    )
    try:
        found = measured(race, timeout_s=options.timeout)
    except LabError as error:
        sys.exit(f"rivals_gpt: {error}")
    words = sys.argv[1 : sys.argv.index("--out")] if "--out" in sys.argv else sys.argv[1:]  # where it was kept is no setting
    command = shlex.join(["python", "benchmarks/rivals_gpt.py", *words])
    lines = records(race, found, command=command)
    with options.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    print(f"planned: {found['replicas']}, {found['planned_s']:.3g} s; weighted replicas {found['planned_weighted_s']:.3g} s")
    for line in lines:
        others = ", ".join(f"{times:.2f} x {other}" for other, times in line["times_as_fast_as"].items())
        gamma = "-" if line["gamma"] is None else f"{line['gamma']:.2f}"
        print(f"{line['contestant']:22} {line['iteration_s']:.3f} s ±{100 * line['spread']:.0f} %, gamma {gamma}; {others}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--bandwidth", type=float, default=125e6, help="bytes per second of every link")
    parser.add_argument("--speeds", help="of the hosts, relative; condition A without")
    parser.add_argument("--paced", type=float, help="flop/s of a host of speed 1, in a paced lab")
    parser.add_argument("--dilate", type=float, default=1.0, help="so many times as long all takes in a paced lab")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--settle", type=int, default=12, help="iterations before one that re-tiles is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for the whole lab")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a .jsonl file; records are added to it; give it last")
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
