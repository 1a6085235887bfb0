"""Elastic runs in a lab, undisturbed and under a fault every 30 s:  python benchmarks/faults.py [OPTIONS]

    --part undisturbed           only one of the two parts
    --rounds 5 --steps 40        of undisturbed runs under MPI and elastic ones, in turn
    --minutes 10 --every-s 30    how long the faults last, and how often one comes
    --samples 16384              of the global batch, of 203-800-26 in float64

Eight hosts have the speeds of the paper's condition A as quotas of a core, and links of 1 Gbit/s; each is a node of Ray.

- undisturbed: the same steps on the same tiling under MPI and in an elastic run, in one lab; the goal is 3 % more at most.
- faults: one rank is killed (SIGKILL) every so often, and a new one joins for each; a ninth host stands by for the first of
  them, and each host that lost its rank for the next. The steps that were done are held against those that the machines that
  were there would have done without changes: by the median step of the same machines (the goal is 98 %), and by the sum of
  their speeds and the first median. The losses of all steps are held against those of one process.

Needs Linux and root (docs/lab.md), and a machine with nothing else to do: some 10 and 25 minutes on 2 cores. A line for each
round and part goes to benchmarks/results/faults.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from faulty.bed import open_bed
from faulty.judging import WARM, share_of_changes, throughput, usual_s
from faulty.training import NET, cluster_of, plain
from paper.setting import CONDITIONS
from tatami.bench.interleaved import machine
from tatami.errors import LabError
from tatami.tiling import DEFAULT_PLANNER, plan
from tatami.workload import net_workload

RESULTS = Path(__file__).parent / "results" / "faults.jsonl"
STANDBY = 0.63
"""The speed of the host without a rank at first."""
MOST_OVERHEAD, LEAST_THROUGHPUT = 0.03, 0.98
_STEP_S = 10.0
"""No step takes longer."""


def undisturbed(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Rounds of runs under MPI and elastic ones, in turn, and what all of them say."""
    cluster = cluster_of(_speeds(options.hosts), hosts=tuple(_speeds(options.hosts)))
    layout = plan(DEFAULT_PLANNER, cluster=cluster, workload=net_workload(NET, samples=options.samples)).layout
    steps = WARM + 1 + options.steps
    ratios = []
    with open_bed(cluster, folder=folder, samples=options.samples) as bed:
        asked = partial(bed.training, steps=steps, layout=json.dumps(layout.to_dict()))
        for number in range(options.rounds):
            mpi = bed.under_mpi(asked(), limit_s=_STEP_S * steps)
            elastic = bed.elastic(asked(), ranks=options.hosts, limit_s=_STEP_S * steps)
            ratios.append(usual_s(elastic) / usual_s(mpi))
            yield {
                "what": "undisturbed round",
                "round": number,
                "mpi_s": usual_s(mpi),
                "elastic_s": usual_s(elastic),
                "losses_off": max(abs(one.loss - other.loss) for one, other in zip(mpi, elastic, strict=True)),
            }
    got = median(ratios) - 1
    yield {
        "what": "undisturbed",
        "hosts": options.hosts,
        "samples": options.samples,
        "steps": options.steps,
        "overhead": got,
        "overheads": [each - 1 for each in ratios],
        "goal": MOST_OVERHEAD,
        "holds": got <= MOST_OVERHEAD,
    }


def disturbed(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A short run without faults, which says how many steps are made in the time, and the run with faults."""
    speeds = {**_speeds(options.hosts), f"h{options.hosts}": STANDBY}
    with open_bed(cluster_of(speeds, hosts=tuple(speeds)), folder=folder, samples=options.samples) as bed:
        run = partial(bed.elastic, ranks=options.hosts)
        short = bed.training(steps=WARM + 1 + options.steps)
        alone_s = usual_s(run(short, limit_s=_STEP_S * short.steps))
        training = replace(bed.training(steps=WARM + round(60 * options.minutes / alone_s)), every_s=options.every_s)
        marks = run(training, limit_s=180 * options.minutes)
    report = json.loads((training.path / "report.json").read_text(encoding="utf-8"))
    by_median, by_speeds = throughput(marks, speeds=speeds)
    expected = plain(options.samples, steps=training.steps)
    yield {
        "what": "faults",
        "hosts": options.hosts,
        "samples": options.samples,
        "steps": len(marks),
        "steps_missing": training.steps - len(marks),
        "undisturbed_step_s": alone_s,
        "minutes": (marks[-1].at_s - marks[0].at_s) / 60,
        "every_s": options.every_s,
        "faults": int((training.path / "struck").read_text()),
        "changes": [{name: each[name] for name in ("at_s", "reason", "settled", "lost_s")} for each in report["changes"]],
        "throughput": by_median,
        "throughput_by_speeds": by_speeds,
        "share_of_changes": share_of_changes(marks),
        "goal": LEAST_THROUGHPUT,
        "holds": by_median >= LEAST_THROUGHPUT,
        "losses_off": max(abs(mark.loss - expected[mark.number]) for mark in marks),
    }


def _speeds(hosts: int) -> dict[str, float]:
    return {f"h{number}": speed for number, speed in enumerate(CONDITIONS["A"][:hosts])}


PARTS = {"undisturbed": undisturbed, "faults": disturbed}


def main() -> None:
    """Measure, judge."""
    options = _options()
    command = shlex.join(["python", "benchmarks/faults.py", *sys.argv[1:]])
    lines: list[dict[str, Any]] = [{"command": command, "machine": machine()}]
    for part in options.part or PARTS:
        with tempfile.TemporaryDirectory(prefix="tatami-") as folder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="latency is not emulated")
            try:
                for line in PARTS[part](options, Path(folder)):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
            except LabError as error:
                sys.exit(f"faults: {error}")
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(options.output)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="both by default")
    parser.add_argument("--hosts", type=int, default=len(CONDITIONS["A"]), help="fewer, to see that it works")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
