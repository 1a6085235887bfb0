"""How long planning takes, in time of a core:  python benchmarks/planning.py [--processors 1000 10000] [--repetitions 5]

A GPT of 96 layers, and a perceptron 1024-4096-1024, over processors of random speeds, eight to a host, a sample for every
quarter of one. Writes benchmarks/results/planning.jsonl: the command and the machine, and a line for each network, planner and
number of processors.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path

from tatami.bench.interleaved import machine
from tatami.cluster import Cluster, Processor
from tatami.tiling import plan
from tatami.workload import Workload, gpt_workload, net_workload

RESULTS = Path(__file__).parent / "results" / "planning.jsonl"
PLANNERS = ("timed", "srpm", "weighted")


NETWORKS: dict[str, Callable[[int], Workload]] = {
    "gpt": lambda samples: gpt_workload(layers=96, width=12288, heads=96, tokens=2048, samples=samples),
    "perceptron": lambda samples: net_workload("1024-4096-1024", samples=samples),
}


def planning_s(network: str, planner: str, *, processors: int) -> tuple[float, float]:
    """Seconds of a core for one plan, and the predicted seconds of an iteration."""
    speeds = random.Random(processors)
    cluster = Cluster(
        processors=tuple(Processor(name=f"p{i}", speed=speeds.uniform(0.3, 1), host=f"h{i // 8}") for i in range(processors))
    )
    workload = NETWORKS[network](4 * processors)
    began_s = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another planner is predicted faster
        found = plan(planner, cluster=cluster, workload=workload)
    return time.process_time() - began_s, found.predicted_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processors", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    lines: list[dict[str, object]] = [{"command": shlex.join(["python", *sys.argv]), "machine": machine()}]
    for network, processors in product(NETWORKS, args.processors):
        # In turn, so that a machine that drifts does so for all of them.
        runs = [{name: planning_s(network, name, processors=processors) for name in PLANNERS} for _ in range(args.repetitions)]
        for name in PLANNERS:
            times_s = [run[name][0] for run in runs]
            line = {"network": network, "planner": name, "processors": processors}
            lines.append({**line, "predicted_s": runs[0][name][1], "cpu_s": times_s})
            told = f"{statistics.median(times_s):.2f} s, {min(times_s):.2f} to {max(times_s):.2f}"
            print(f"{network}, {processors:,}, {name}: {told}; predicted {runs[0][name][1]:.4g} s", flush=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
