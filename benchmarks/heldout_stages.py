"""Planned times of layouts with pipeline stages that nothing was fitted on:  python benchmarks/heldout_stages.py [OPTIONS]

    --layouts 2                  only so many in each lab, to see that it works
    --out FILE                   where the records go

In two labs of four hosts, 100 Mbit/s and 1 Gbit/s, a GPT is tiled with its speeds and links as `tatami.tile` measures them, and
moved (`tatami.train.move`) to layouts drawn with a seed: two to four stages, one or two replicas, machines in any order, cuts
near what the speeds ask for, 1 to 8 micro-batches. Of each, three blocks of iterations are timed. Needs Linux and root
(docs/lab.md) and a machine with nothing else to do. Writes a line for each layout with `measured_s`, its spread, `planned_s`
and the error, and one with the median of the errors.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from elsewhere import of_ranks
from rehearsal.goals import inside_expected_range
from tatami.bench.interleaved import machine
from tatami.clock import SystemClock
from tatami.cluster import Cluster, Link, Processor
from tatami.lab import Lab
from tatami.tiling import Layout, Replica, StagedLayout
from tatami.workload import Workload

RESULTS = Path(__file__).parent / "results" / "heldout_stages.jsonl"
SPEEDS, LINKS = (1.0, 1.0, 0.5, 0.5), (12.5e6, 125e6)
LAYERS, WIDTH, TOKENS, SAMPLES, CHARACTERS = 8, 240, 64, 24, 96
BLOCKS, ITERATIONS, ASKED = 3, 3, 0.08


def drawn(cluster: Cluster, workload: Workload, *, seed: int) -> StagedLayout:
    """A layout of these machines."""
    draw = random.Random(seed)
    names = [each.name for each in cluster.processors]
    draw.shuffle(names)
    shapes = [(stages, replicas) for stages, replicas in product((2, 3, 4), (1, 2)) if stages * replicas <= len(names)]
    stages, replicas = draw.choice(shapes)
    rows = [names[replica * stages : (replica + 1) * stages] for replica in range(replicas)]
    speeds = {name: float(speed) for name, speed in cluster.speeds.items()}
    work = list(accumulate(piece.flop_per_sample for piece in workload.pieces))
    shares = [sum(speeds[row[stage]] for row in rows) * draw.uniform(0.8, 1.25) for stage in range(stages)]
    cuts: list[int] = []
    for index, reached in enumerate(list(accumulate(shares))[:-1]):
        nearest = min(range(len(work)), key=lambda at: abs(work[at] - work[-1] * reached / sum(shares)))
        least, most = (cuts[-1] if cuts else 0) + 1, len(work) - (stages - 1 - index)
        cuts.append(min(max(nearest + 1, least), most))
    widths = [min(speeds[name] for name in row) for row in rows]
    micro_batches = draw.choice((1, 2, 4, 8))
    return StagedLayout(
        stages=tuple(
            Layout(
                replicas=tuple(
                    Replica(width=width / sum(widths), processors=(row[stage],), heights=(1.0,), micro_batches=micro_batches)
                    for width, row in zip(widths, rows, strict=True)
                )
            )
            for stage in range(stages)
        ),
        cuts=tuple(cuts),
    )


def rank(bandwidth: float, layouts: int, found: Path) -> None:
    """One rank of a lab."""
    import tatami
    from tatami.cli.tasks import CharacterGpt, NextTokenLoss
    from tatami.train import move

    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm, clock = tatami.init(), SystemClock()
    rows = torch.randint(0, CHARACTERS, (SAMPLES, TOKENS + 1))
    x, y = rows[:, :-1], rows[:, 1:]
    network = CharacterGpt(characters=CHARACTERS, layers=LAYERS, width=WIDTH, heads=6, tokens=TOKENS)
    model = tatami.tile(network, comm, batch_size=SAMPLES, sample=x[:2], stages=2, reduction="mean")
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=1e-3), NextTokenLoss()
    assert model.staged is not None

    def iterate(times: int) -> float:
        comm.barrier()
        began_s = clock.now_s()
        for _ in range(times):
            optimizer.zero_grad()
            for x_part, y_part in model.micro_batches(x, y):
                torch.autograd.backward(loss(model(x_part), y_part))
            optimizer.step()
        comm.barrier()
        return (clock.now_s() - began_s) / times

    records: list[dict[str, Any]] = []
    for seed in range(layouts):
        layout = drawn(model.cluster, model.staged.workload, seed=seed)
        move(model, layout, optimizer=optimizer)
        iterate(2)
        blocks_s = [iterate(ITERATIONS) for _ in range(BLOCKS)]
        assert model.stage is not None
        plan = model.stage.plan
        assert plan is not None
        measured_s = median(blocks_s)
        records.append(
            {
                "what": "held-out stages",
                "bandwidth_bytes_per_s": bandwidth,
                "layout": layout.to_dict(),
                "measured_s": measured_s,
                "spread": (max(blocks_s) - min(blocks_s)) / measured_s,
                "in_flight": plan.in_flight,
                "planned_s": plan.iteration_s,
                "range_s": plan.range_s,
                "error": plan.iteration_s / measured_s - 1,
            }
        )
    if comm.rank == 0:
        found.write_text(json.dumps(records), encoding="utf-8")


def measure(bandwidth: float, *, layouts: int, flop_per_s: float | None, dilation: float) -> list[dict[str, Any]]:
    """What the ranks of one lab find; a paced one, where it is known how many flop/s a host of speed 1 computes."""
    unit = flop_per_s or 1.0
    processors = tuple(Processor(name=f"p{i}", speed=speed * unit, host=f"h{i}") for i, speed in enumerate(SPEEDS))
    paced = flop_per_s is not None
    cluster = Cluster(processors=processors, network=Link(bandwidth_bytes_per_s=bandwidth, latency_s=50e-6))
    with tempfile.TemporaryDirectory(prefix="tatami-heldout-") as folder, warnings.catch_warnings(), ExitStack() as stack:
        lab = stack.enter_context(Lab(cluster, paced=paced, dilation=dilation))
        warnings.filterwarnings("ignore", message="latency is not emulated")
        found = Path(folder) / "found.json"
        words = ["-m", "heldout_stages", "rank", str(bandwidth), str(layouts), str(found)]
        code = lab.run(words, environment=of_ranks(preload=("heldout_stages", "torch.export")), timeout_s=1800)
        if code:
            sys.exit(code)
        records: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
    return records


def main(arguments: Sequence[str]) -> None:
    """Measure, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=16, help="how many in each lab")
    parser.add_argument("--paced", type=float, help="flop/s of a host of speed 1, in a paced lab")
    parser.add_argument("--dilate", type=float, default=1.0, help="so many times as long all takes in a paced lab")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the records go")
    options = parser.parse_args(arguments)
    take = partial(measure, layouts=options.layouts, flop_per_s=options.paced, dilation=options.dilate)
    records = [record for bandwidth in LINKS for record in take(bandwidth)]
    errors = [abs(record["error"]) for record in records]
    summary = {"layouts": len(errors), "median": median(errors), "largest": max(errors), "asked": ASKED}
    command = f"python benchmarks/heldout_stages.py --layouts {options.layouts}"
    if options.paced:
        command += f" --paced {options.paced:g} --dilate {options.dilate:g}"
    judged = {**summary, "holds": summary["median"] <= ASKED}
    lines = [{"command": command, "machine": machine()}, *records, judged, inside_expected_range(records)]
    options.out.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    for each in lines:
        print(json.dumps(each))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(sys.argv[1:])
