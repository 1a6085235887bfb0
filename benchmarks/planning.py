"""How long planning takes, in time of a core:  python benchmarks/planning.py [--processors 1000 10000] [--repetitions 5]

A GPT of 96 layers, and a perceptron 1024-4096-1024, over processors of random speeds in flop/s, eight to a host, four samples
for each; and a GPT of 1.3 G weights over hosts with memory of 8 to 80 GiB for each processor, and over hosts with links of
their own. The first planner also chooses who takes part; in the last two only it is asked. Writes
benchmarks/results/planning.jsonl: the command and the machine, and a line for each network, planner and number of processors.
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
from tatami.cluster import Cluster, OwnLink, Processor
from tatami.tiling import plan
from tatami.workload import Workload, gpt_workload, net_workload

RESULTS = Path(__file__).parent / "results" / "planning.jsonl"
PLANNERS = ("timed", "srpm", "weighted")


NETWORKS: dict[str, Callable[[int], Workload]] = {
    "gpt": lambda samples: gpt_workload(layers=96, width=12288, heads=96, tokens=2048, samples=samples),
    "perceptron": lambda samples: net_workload("1024-4096-1024", samples=samples),
    "gpt, mixed memory": lambda samples: gpt_workload(layers=24, width=2048, heads=16, tokens=1024, samples=samples),
    "gpt, own links": lambda samples: gpt_workload(layers=24, width=2048, heads=16, tokens=1024, samples=samples),
}
_GIB = 1 << 30


def planning_s(network: str, planner: str, *, processors: int) -> tuple[float, float]:
    """Seconds of a core for one plan, and the predicted seconds of an iteration."""
    draw = random.Random(processors)

    def processor(index: int) -> Processor:
        speed, host = draw.uniform(3e12, 1e13), f"h{index // 8}"
        if network == "gpt, mixed memory":
            return Processor(name=f"p{index}", speed=speed, host=host, memory_bytes=draw.choice([8, 16, 24, 40, 80]) * _GIB)
        if network == "gpt, own links":
            link = OwnLink(bandwidth_bytes_per_s=draw.choice([1.25e8, 1.25e9, 3e9]) * draw.uniform(0.8, 1.2))
            return Processor(name=f"p{index}", speed=speed, host=f"h{index}", link=link)
        return Processor(name=f"p{index}", speed=speed, host=host)

    cluster = Cluster(processors=tuple(map(processor, range(processors))))
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
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS], choices=[*NETWORKS])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    lines: list[dict[str, object]] = [{"command": shlex.join(["python", *sys.argv]), "machine": machine()}]
    for network, processors in product(args.networks, args.processors):
        planners = PLANNERS if ", " not in network else PLANNERS[:1]
        # In turn, so that a machine that drifts does so for all of them.
        runs = [{name: planning_s(network, name, processors=processors) for name in planners} for _ in range(args.repetitions)]
        for name in planners:
            times_s = [run[name][0] for run in runs]
            line = {"network": network, "planner": name, "processors": processors}
            lines.append({**line, "predicted_s": runs[0][name][1], "cpu_s": times_s})
            told = f"{statistics.median(times_s):.2f} s, {min(times_s):.2f} to {max(times_s):.2f}"
            print(f"{network}, {processors:,}, {name}: {told}; predicted {runs[0][name][1]:.4g} s", flush=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
