"""A GPT that no host holds, on four of them:  python benchmarks/capped.py [--json] [OPTIONS]

In labs whose hosts have a limit of memory by control group, in bytes that do not depend on what else the machine does:

1. a GPT of next to no size shows what a rank takes of itself (Python, torch, MPI, what tiling imports): the base;
2. the plan of the whole GPT for one host that has `--cap` of what it needs is refused, and without a plan the kernel ends it;
3. four hosts of that memory train it, with the losses of the plain loop.

The limit of a host is its processor's memory, which is what plans may use, and the base. What each rank held at its peak is
told beside what was planned for it. With `--stages 4` the hosts share out layers in place of units. Adds a line to
`benchmarks/results/capped.jsonl`. Needs Linux and root (docs/lab.md).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from elsewhere import python_path
from tatami.bench.interleaved import machine
from tatami.cli.tasks import CharacterGpt, NextTokenLoss
from tatami.clock import SystemClock
from tatami.cluster import Cluster, Link, Processor
from tatami.comm.detect import init
from tatami.errors import LabError, MemoryLackError
from tatami.lab import Lab
from tatami.lab.rank import PRELOAD_VARIABLE
from tatami.tiling import Layout, Plan, Replica, plan
from tatami.tiling.memory import memory_bytes
from tatami.train import find_blocks, tile, workload_of
from tatami.workload import Workload

RESULTS = Path(__file__).parent / "results" / "capped.jsonl"
HOSTS = 4
_CHARACTERS = 96
_MIB = 1 << 20
_SLACK_BYTES = 24 * _MIB
"""Of a host's limit, for what is not any rank's own: mpiexec's proxy, MPI's shared memory, the kernel's tables."""
_LEARNING_RATE = 1e-3
_TIMEOUT_S = 600.0
_ENVIRONMENT = {
    # What is given back goes back to the kernel at once, so that a peak is what was held.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    PRELOAD_VARIABLE: "torch._dynamo,torch.export,capped",
}


@dataclass(frozen=True, kw_only=True)
class CappedRun:
    """What the ranks of one lab train.

    Attributes:
        layers, width, heads, tokens: of the GPT.
        samples: sequences of the global batch.
        steps: of Adam.
        memory_bytes: of each processor; None: there is no limit.
        hosts: how many.
        stages: of the pipeline, where there are several hosts; 1: none.
        micro_batches: of it.
    """

    layers: int
    width: int
    heads: int
    tokens: int
    samples: int
    steps: int
    memory_bytes: int | None = None
    hosts: int = HOSTS
    stages: int = 1
    micro_batches: int | None = None

    @property
    def cluster(self) -> Cluster:
        processors = tuple(
            Processor(name=f"p{i}", speed=1.0, host=f"h{i}", memory_bytes=self.memory_bytes) for i in range(self.hosts)
        )
        return Cluster(processors=processors, network=Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6))

    def network(self) -> nn.Module:
        """The same wherever it is made."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return CharacterGpt(
                characters=_CHARACTERS, layers=self.layers, width=self.width, heads=self.heads, tokens=self.tokens
            )

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Texts (samples, tokens), and what follows."""
        texts = torch.randint(_CHARACTERS, (self.samples, self.tokens + 1), generator=torch.Generator().manual_seed(0))
        return texts[:, :-1], texts[:, 1:]


def whole(processor: str) -> Layout:
    """All of it on one processor."""
    return Layout(replicas=(Replica(width=1.0, processors=(processor,), heights=(1.0,)),))


def as_rank(description: Path, folder: Path) -> None:
    """One rank of a lab: tile, train, and write down what was held. Alone, it does not ask a plan whether it may."""
    run = CappedRun(**json.loads(description.read_text(encoding="utf-8")))
    comm = init(timeout_s=_TIMEOUT_S)
    x, y = run.batch()
    how: dict[str, Any] = {"layout": whole("p0")} if run.hosts == 1 else {"stages": run.stages}
    if run.stages > 1 and run.hosts > 1:
        how["micro_batches"] = run.micro_batches
    model = tile(
        run.network, comm, batch_size=run.samples, sample=x[:2], speeds=run.cluster, reduction="mean", quiet=True, **how
    )
    planned_bytes = None if model.stage is None or model.stage.plan is None else model.stage.plan.memory_bytes
    tiled_bytes = peak_bytes()
    optimizer, loss_function = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE), NextTokenLoss()
    losses, clock, steps_s = [], SystemClock(), []
    for _ in range(run.steps):
        began_s, parts = clock.now_s(), []
        optimizer.zero_grad()
        for here, targets in model.micro_batches(x, y):
            loss = loss_function(model(here), targets)
            torch.autograd.backward(loss)
            parts.append(loss.detach())
        optimizer.step()
        losses.append(model.global_loss(parts))
        steps_s.append(clock.now_s() - began_s)
    found = {
        "tiled_bytes": tiled_bytes,
        "peak_bytes": peak_bytes(),
        "planned_bytes": planned_bytes,
        "step_s": median(steps_s),
        "losses": losses,
    }
    (folder / f"{model.name}.json").write_text(json.dumps(found), encoding="utf-8")
    comm.barrier()


def peak_bytes() -> int:
    """The most that this process has held of its own: without programs and libraries, which are files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.endswith(" kB")}
    return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) * 1024


def in_lab(run: CappedRun, *, base_bytes: int | None, timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """What each rank found, by processor, and what the kernel ended; nothing was found where ranks did not come through."""
    with tempfile.TemporaryDirectory(prefix="tatami-capped-") as name, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")
        folder = Path(name)
        (folder / "run").write_text(json.dumps(asdict(run)), encoding="utf-8")
        with Lab(run.cluster, base_memory=base_bytes) as lab:
            words = ["-m", "capped", "--rank", str(folder / "run"), name]
            code = lab.run(words, environment={**python_path(), **_ENVIRONMENT}, timeout_s=timeout_s)
            starved = lab.starved()
        found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("p*.json")}
    if code and not starved:
        raise LabError(f"the ranks ended with exit code {code}; what they said is above")
    return ({} if code else found), starved


def planned(run: CappedRun, workload: Workload) -> Plan:
    """For its hosts.

    Raises:
        MemoryLackError: they do not hold it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(cluster=run.cluster, workload=workload)


def plain_losses(run: CappedRun) -> list[float]:
    """Of the plain torch loop, here."""
    model, (x, y), losses = run.network(), run.batch(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    for _ in range(run.steps):
        optimizer.zero_grad()
        loss = NextTokenLoss()(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def measured(run: CappedRun, *, cap: float, timeout_s: float) -> dict[str, Any]:
    """The record.

    Args:
        run: without memory.
        cap: each host has this part of what the whole needs.
    """
    network, (x, _) = run.network(), run.batch()
    workload = workload_of(network, find_blocks(network, sample=x[:2]), samples=run.samples)
    weights_bytes = sum(parameter.nbytes for parameter in network.parameters())
    del network
    alone_bytes = memory_bytes(whole("p0"), workload=workload)["p0"]
    tiny = replace(run, width=8 * run.heads, layers=2, tokens=8, samples=HOSTS)
    base, _ = in_lab(tiny, base_bytes=None, timeout_s=timeout_s)
    base_bytes = max(each["peak_bytes"] for each in base.values())
    capped = replace(run, memory_bytes=round(cap * alone_bytes))
    one = replace(capped, hosts=1, stages=1)
    try:
        planned(one, workload)
        refused = ""
    except MemoryLackError as error:
        refused = str(error)
    laid = planned(capped, workload)
    _, killed = in_lab(one, base_bytes=base_bytes + _SLACK_BYTES, timeout_s=timeout_s)
    found, starved = in_lab(capped, base_bytes=base_bytes + _SLACK_BYTES, timeout_s=timeout_s)
    return {
        **asdict(capped),
        "weights_bytes": weights_bytes,
        "alone_bytes": alone_bytes,
        "base_bytes": base_bytes,
        "slack_bytes": _SLACK_BYTES,
        "refused": refused,
        "alone": killed,
        "replicas": [len(replica.processors) for replica in laid.layout.replicas] if run.stages == 1 else [],
        "planned_bytes": next((each["planned_bytes"] for each in found.values()), None) or laid.memory_bytes,
        "step_s": max((each["step_s"] for each in found.values()), default=None),
        "starved": starved,
        "held_bytes": {name: each["peak_bytes"] - base_bytes for name, each in sorted(found.items())},
        "held_to_tile_bytes": {name: each["tiled_bytes"] - base_bytes for name, each in sorted(found.items())},
        "losses": next((each["losses"] for each in found.values()), []),
        "plain_losses": plain_losses(run),
    }


def told(record: dict[str, Any]) -> str:
    """For people."""

    def mib(size_bytes: float) -> str:
        return f"{size_bytes / _MIB:.0f} MiB"

    way = f"{record['stages']} stages" if record["stages"] > 1 else f"replicas of {record['replicas']}"
    took = "" if record["step_s"] is None else f", {record['step_s']:.3g} s a step"
    lines = [
        f"weights {mib(record['weights_bytes'])}; to train on one host {mib(record['alone_bytes'])}, and each host has "
        f"{mib(record['memory_bytes'])} beside a base of {mib(record['base_bytes'] + record['slack_bytes'])}",
        f"planned for one host: {record['refused'] or 'NOT refused'}",
        f"on one host without a plan: {'; '.join(record['alone'].values()) or 'NOT ended'}",
        f"on {record['hosts']}, {way}{took}: {'; '.join(record['starved'].values()) or 'nothing was ended'}",
    ]
    for name, held in record["held_bytes"].items():
        lines.append(
            f"  {name}: planned {mib(record['planned_bytes'][name])}, held at most {mib(held)}, "
            f"while it was tiled {mib(record['held_to_tile_bytes'][name])}"
        )
    return "\n".join([*lines, f"losses {record['losses']}", f"plain  {record['plain_losses']}"])


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.rank:
        as_rank(*options.rank)
        return
    run = CappedRun(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        tokens=options.tokens,
        samples=options.samples,
        steps=options.steps,
        stages=options.stages,
        micro_batches=options.micro_batches,
    )
    try:
        record = measured(run, cap=options.cap, timeout_s=options.timeout)
    except LabError as error:
        sys.exit(f"capped: {error}")
    words = sys.argv[1 : sys.argv.index("--out")] if "--out" in sys.argv else sys.argv[1:]
    record |= {"command": shlex.join(["python", "benchmarks/capped.py", *words]), "machine": machine()}
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record) if options.json else told(record))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages, in place of units that are shared")
    parser.add_argument("--micro-batches", type=int, help="of the pipeline")
    parser.add_argument("--cap", type=float, default=0.4, help="what a host has of the memory that the whole needs")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, help="seconds for each lab")
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a .jsonl file; the record is added to it; give it last")
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
