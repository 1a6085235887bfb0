"""Predicted against measured memory of a rank:  python benchmarks/memory.py [--only gpt-25m] [--out FILE]

Twenty cases: five networks, each on one rank, in replicas, in one replica of tiles, and in two replicas of which one has two
tiles, by turns in the Trainer and in a loop written by hand, with Adam and with SGD. Four more: a GPT of 25 M parameters in
four replicas of one rank, with a sharded optimizer and without. Each rank is a process of its own under
mpiexec. What is measured is the peak of the resident set size over some iterations (`VmHWM`, set back by
`/proc/self/clear_refs` before them), less the size after imports and the training of a tiny network of the same kind, where
freed memory goes back at once, as in a run whose plan fills a machine's memory (tatami.runtime.allocator). Writes
benchmarks/results/memory.jsonl: the command and the machine, and a line for each case with the rank that is furthest off.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tatami
from tatami.cluster import Cluster, Processor
from tatami.comm.base import AbstractCommunicator
from tatami.runtime.allocator import give_freed_memory_back
from tatami.tiling import Layout, Replica
from tatami.tiling.memory import memory_bytes
from tatami.workload import Workload

RESULTS = Path(__file__).parent / "results" / "memory.jsonl"
CLASSES, TOKENS = 10, 128
WARM, MEASURED = 3, 4
LIMIT_S = 900


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (each.view(batch, tokens, self.heads, -1).transpose(1, 2) for each in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return result


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        result: torch.Tensor = x + self.perceptron(self.between(x))
        return result


class GPT(nn.Module):
    """Of letters; it says of a text which of `CLASSES` it is."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(65, width), nn.Embedding(TOKENS, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.letters(text) + self.places.weight[: text.shape[1]])
        result: torch.Tensor = self.head(x.mean(1))
        return result


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Identity() if inputs == outputs else short

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(y + self.short(x))


class ResNet(nn.Module):
    """ResNet-18 for small images."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [width << max(0, level - 1) for level in range(depth + 1)]
        levels = [
            nn.Sequential(Residual(sizes[i], sizes[i + 1], 2 if i else 1), Residual(sizes[i + 1], sizes[i + 1], 1))
            for i in range(depth)
        ]
        self.body, self.head = nn.Sequential(stem, *levels), nn.Linear(sizes[-1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x).mean((2, 3)))
        return result


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters, self.cells = nn.Embedding(65, width), nn.LSTM(width, 2 * width, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, CLASSES))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.cells(self.letters(text))[0][:, -1])
        return result


def perceptron(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU(), nn.Linear(width, hidden), nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )  # fmt: skip


def text(samples: int) -> torch.Tensor:
    return torch.randint(65, (samples, TOKENS))


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network to be measured, the batch it is trained with, and a tiny one of the same kind for the base."""

    build: Callable[[], nn.Module]
    tiny: Callable[[], nn.Module]
    draw: Callable[[int], torch.Tensor]
    samples: int


NETWORKS = {
    "gpt-4.8m": Network(build=partial(GPT, 6, 256, 8), tiny=partial(GPT, 1, 16, 2), draw=text, samples=16),
    "gpt-25m": Network(build=partial(GPT, 8, 512, 8), tiny=partial(GPT, 1, 16, 2), draw=text, samples=8),
    "resnet18": Network(
        build=partial(ResNet, 32), tiny=partial(ResNet, 4, 1), draw=lambda n: torch.randn(n, 3, 32, 32), samples=32
    ),
    "perceptron": Network(
        build=partial(perceptron, 1024, 4096),
        tiny=partial(perceptron, 1024, 4),
        draw=lambda n: torch.randn(n, 1024),
        samples=512,
    ),
    "lstm": Network(build=partial(Recurrent, 256), tiny=partial(Recurrent, 8), draw=text, samples=32),
}  # fmt: skip
REPLICAS: dict[str, tuple[tuple[float, ...], ...]] = {
    "one": ((1.0,),),
    "replicas": ((1.0,), (1.0,)),
    "tiles": ((0.5, 0.5),),
    "mixed": ((0.5, 0.5), (1.0,)),
    "four": ((1.0,),) * 4,
    "sharded": ((1.0,),) * 4,
}
"""Of each replica the heights of its ranks."""
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
MOMENTS = {"adam": 2, "sgd": 0}
LOOPS = (("Trainer", "adam"), ("own", "adam"), ("Trainer", "sgd"), ("own", "sgd"))


@dataclass(frozen=True, kw_only=True)
class Case:
    network: str
    replicas: str
    loop: str
    optimizer: str

    @property
    def name(self) -> str:
        return f"{self.network}/{self.replicas}/{self.loop}/{self.optimizer}"

    @property
    def ranks(self) -> int:
        return sum(map(len, REPLICAS[self.replicas]))


CASES = [
    Case(network=network, replicas=replicas, loop=loop, optimizer=optimizer)
    for row, network in enumerate(NETWORKS)
    for replicas, (loop, optimizer) in zip(REPLICAS, [*LOOPS[row % 4 :], *LOOPS[: row % 4]], strict=False)
]
CASES += [
    Case(network="gpt-25m", replicas=replicas, loop=loop, optimizer="adam")
    for replicas in ("four", "sharded")
    for loop in ("own", "Trainer")
]


def layout_of(replicas: str) -> Layout:
    ranks = iter(range(sum(map(len, REPLICAS[replicas]))))
    return Layout(
        replicas=tuple(
            Replica(width=1 / len(REPLICAS[replicas]), processors=tuple(f"p{next(ranks)}" for _ in heights), heights=heights)
            for heights in REPLICAS[replicas]
        )
    )


def cluster_of(ranks: int) -> Cluster:
    return Cluster(processors=tuple(Processor(name=f"p{rank}", speed=1.0, host="one") for rank in range(ranks)))


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


class Training:
    """A network on the ranks, trained as the case says."""

    def __init__(self, case: Case, comm: AbstractCommunicator, build: Callable[[], nn.Module]) -> None:
        network = NETWORKS[case.network]
        torch.manual_seed(0)
        self.model = tatami.tile(
            build, comm, batch_size=network.samples, sample=network.draw(4), speeds=cluster_of(case.ranks),
            layout=layout_of(case.replicas), reduction="mean", quiet=True, sharded_optimizer=case.replicas == "sharded",
        )  # fmt: skip
        self._x = network.draw(network.samples)
        self._y = torch.randint(CLASSES, (network.samples,))
        optimizer = partial(OPTIMIZERS[case.optimizer], lr=1e-4)
        self._trainer = self._optimizer = None
        if case.loop == "Trainer":
            self._trainer = tatami.Trainer(self.model, optimizer=optimizer, loss=nn.CrossEntropyLoss())
        else:
            self._optimizer = optimizer(self.model.parameters())

    def run(self, iterations: int) -> None:
        if self._trainer is not None:
            data = torch.utils.data.TensorDataset(self._x, self._y)
            self._trainer.fit(data, batch_size=len(self._x), iterations=self._trainer.iteration + iterations)
            return
        assert self._optimizer is not None
        for _ in range(iterations):
            x, y = self.model.local(self._x, self._y)
            self._optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()


def assumed(workload: Workload, case: Case) -> Workload:
    """The workload with what the case keeps of each weight."""
    copies = 2 + MOMENTS[case.optimizer] + (case.loop == "Trainer")
    sharded = copies - 2 if workload.sharded_bytes_per_parameter else 0
    return replace(
        workload,
        state_bytes_per_parameter=copies * workload.element_bytes,
        sharded_bytes_per_parameter=sharded * workload.element_bytes,
        update_bytes_per_parameter=workload.update_bytes_per_parameter if case.optimizer == "adam" else 0.0,
    )


def measure(case: Case) -> None:
    """One rank of a case; rank 0 prints what all have measured, in one line."""
    comm = tatami.init()
    give_freed_memory_back()
    tiny = Training(case, comm, NETWORKS[case.network].tiny)
    tiny.run(WARM)
    del tiny
    trim()
    base = resident_bytes("VmRSS")
    training = Training(case, comm, NETWORKS[case.network].build)
    training.run(WARM)
    after = resident_bytes("VmRSS")
    comm.barrier()
    forget_peak()
    training.run(MEASURED)
    peak = resident_bytes("VmHWM")
    layout = layout_of(case.replicas)
    predicted = memory_bytes(layout, workload=assumed(training.model.workload, case), ranks=comm.size)
    own = {
        "rank": comm.rank,
        "base_bytes": base,
        "measured_bytes": peak - base,
        "between_bytes": after - base,
        "predicted_bytes": round(predicted[f"p{comm.rank}"]),
        "parameters": sum(each.numel() for each in training.model.parameters()),
    }
    ranks = comm.allgather_object(own)
    if comm.rank == 0:
        print(json.dumps(ranks), flush=True)


def run(case: Case) -> dict[str, object]:
    """All ranks of a case, as processes."""
    command = [
        str(Path(sys.executable).parent / "mpiexec"),
        "-n",
        str(case.ranks),
        sys.executable,
        __file__,
        "--case",
        case.name,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False)
    ranks: list[dict[str, Any]] = next((json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")), [])
    if done.returncode or len(ranks) < case.ranks:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    errors = [each["predicted_bytes"] / each["measured_bytes"] - 1 for each in ranks]
    return {"case": case.name, **asdict(case), "error": max(errors, key=abs), "ranks": ranks}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--case", help="be a rank of this case")
    args = parser.parse_args(arguments)
    if args.case:
        measure(next(case for case in CASES if case.name == args.case))
        return
    lines: list[dict[str, object]] = [{"command": shlex.join(["python", *sys.argv])}]
    for case in CASES:
        if args.only in case.name:
            lines.append(run(case))
            told = ", ".join(f"{r['measured_bytes'] / 1e6:.0f}/{r['predicted_bytes'] / 1e6:.0f}" for r in lines[-1]["ranks"])  # type: ignore[attr-defined]
            print(f"{case.name:40} {lines[-1]['error']:+.1%}  measured/predicted MB {told}", flush=True)
            args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
