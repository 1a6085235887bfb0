"""Predictions where speeds are measured from a sample of two:  python benchmarks/measured_speeds.py [--json] [--only NAME]

Twelve cases: six networks (perceptrons, CNNs, a GPT, an LSTM) in a lab of two unequal hosts, with speeds that `tatami.tile`
measures and with those of `tatami probe --model`, each from a sample of two. The predicted time of an iteration of the
recommended plan is compared with the median of measured ones. Needs Linux and root (docs/lab.md), and a machine with nothing
else to do: some 5 minutes on 2 cores. Writes `benchmarks/results/measured_speeds.jsonl`: the command and the machine, a line
for each case with `measured_s`, its spread, `predicted_s` and `error`, and a line that says whether all are within 25 %.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import tatami
from elsewhere import of_ranks
from memory import CLASSES, GPT, Network, Recurrent, ResNet, perceptron, text
from tatami.bench.interleaved import machine
from tatami.cluster import Cluster, Link, Processor
from tatami.comm.base import AbstractCommunicator
from tatami.comm.detect import init
from tatami.errors import LabError
from tatami.lab import Lab
from tatami.model.cluster_probe import probe_network
from tatami.tiling import AlphaBetaCost

RESULTS = Path(__file__).parent / "results" / "measured_speeds.jsonl"
GOAL = 0.25
SAMPLE = 2
WAYS = ("tile", "probe")
_WARM, _ITERATIONS, _LEAST_S = 3, 15, 3.0
_TIMEOUT_S = 600.0
_LAB = Cluster(
    processors=(Processor(name="p0", speed=0.9, host="h0"), Processor(name="p1", speed=0.45, host="h1")),
    network=Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6),
)


def _images(samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 32, 32)


def _cnn() -> nn.Module:
    """Three convolutions without normalization."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def _vectors(width: int, samples: int) -> torch.Tensor:
    return torch.randn(samples, width)


NETWORKS = {
    "perceptron small": Network(
        build=partial(perceptron, 203, 800), tiny=nn.Identity, draw=partial(_vectors, 203), samples=1024
    ),
    "perceptron wide": Network(
        build=partial(perceptron, 512, 2048), tiny=nn.Identity, draw=partial(_vectors, 512), samples=512
    ),
    "cnn": Network(build=_cnn, tiny=nn.Identity, draw=_images, samples=128),
    "resnet18": Network(build=partial(ResNet, 16), tiny=nn.Identity, draw=_images, samples=64),
    "gpt": Network(build=partial(GPT, 4, 128, 4), tiny=nn.Identity, draw=text, samples=32),
    "lstm": Network(build=partial(Recurrent, 64), tiny=nn.Identity, draw=text, samples=64),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Which network, and what measures the speeds."""

    network: str
    way: str

    @property
    def name(self) -> str:
        return f"{self.network}/{self.way}"


CASES = tuple(Case(network=network, way=way) for network in NETWORKS for way in WAYS)


def found_by(case: Case, comm: AbstractCommunicator) -> dict[str, Any]:
    """Measure speeds, lay out, predict, train. Collective; the same on every rank."""
    network = NETWORKS[case.network]
    torch.manual_seed(0)
    plain, sample = network.build(), network.draw(SAMPLE)
    speeds: Cluster | Literal["measure"] = "measure"
    if case.way == "probe":
        speeds = probe_network(plain, comm, sample=sample, batch_size=network.samples)
    model = tatami.tile(plain, comm, batch_size=network.samples, sample=sample, speeds=speeds, reduction="mean", quiet=True)
    cost = AlphaBetaCost()
    predicted_s = cost.price(model.layout, cluster=model.cluster, workload=model.workload).total
    x, y = network.draw(network.samples), torch.randint(CLASSES, (network.samples,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times_s: list[float] = []
    while len(times_s) < _WARM + _ITERATIONS or sum(comm.bcast_object(times_s)) < _LEAST_S:
        comm.barrier()
        start_s = time.perf_counter()
        local_x, local_y = model.local(x, y)
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(local_x), local_y))
        optimizer.step()
        times_s.append(time.perf_counter() - start_s)
    rounds_s = [max(ranks) for ranks in zip(*comm.allgather_object(times_s[_WARM:]), strict=True)]
    measured_s = median(rounds_s)
    low_s, high_s = (sorted(rounds_s)[round(share * (len(rounds_s) - 1))] for share in (0.1, 0.9))
    return {
        "case": case.name,
        "samples": network.samples,
        "replicas": [list(replica.processors) for replica in model.layout.replicas],
        "widths": [replica.width for replica in model.layout.replicas],
        "micro_batches": [replica.micro_batches for replica in model.layout.replicas],
        "measured_s": measured_s,
        "spread": (high_s - low_s) / measured_s,
        "iterations": len(rounds_s),
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1,
    }


def rank(only: str, found: Path) -> None:
    """One rank of the lab."""
    comm = init(timeout_s=_TIMEOUT_S)
    records = []
    for case in CASES:
        if only in case.name:
            records.append(found_by(case, comm))
            if comm.rank == 0:
                print(_told(records[-1]), flush=True)
    if comm.rank == 0:
        found.write_text(json.dumps(records), encoding="utf-8")


def measure(only: str) -> list[dict[str, Any]]:
    """What the ranks of the lab find."""
    with tempfile.TemporaryDirectory(prefix="tatami-measured-speeds-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")  # it is probed
        found = Path(folder) / "found.json"
        with Lab(_LAB) as lab:
            words = [str(Path(__file__).resolve()), "--only", only, "--rank", str(found)]
            code = lab.run(words, environment=of_ranks(), timeout_s=1800.0)
        if code != 0:
            raise LabError(f"the ranks ended with exit code {code}; what they said is above")
        records: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
        return records


def _told(record: dict[str, Any]) -> str:
    return (
        f"{record['case']:24} {1e3 * record['measured_s']:8.1f} ms ±{50 * record['spread']:.0f} %, predicted "
        f"{1e3 * record['predicted_s']:8.1f} ms: {100 * record['error']:+.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rank", type=Path, help="be a rank of the lab, and write this file")
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.only, options.rank)
        return
    try:
        records = measure(options.only)
    except LabError as error:
        sys.exit(f"measured_speeds: {error}")
    errors = [abs(record["error"]) for record in records]
    lines: list[dict[str, Any]] = [
        {"command": shlex.join(["python", *sys.argv]), "machine": machine()},
        *records,
        {"cases": len(records), "largest": max(errors), "goal": GOAL, "holds": max(errors) <= GOAL},
    ]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if options.json:
        print("\n".join(map(json.dumps, lines)))
    else:
        print(f"largest error {max(errors):.1%} of {len(records)} cases; goal {GOAL:.0%}")


if __name__ == "__main__":
    main()
