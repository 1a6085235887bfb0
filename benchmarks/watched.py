"""Courses with machines that become slow, in labs:  python benchmarks/watched.py --out benchmarks/results/watched.jsonl

Each trace is a course over the paper's machines of condition A, of which some become slower for a while. In one lab for each
trace run, one after the other: the rule of `Retiler()` ("notice"), the settling rule, and an oracle that is told every change
and lays the tiles for it at once; who is first changes from trace to trace. All start from measured speeds. What counts is the
whole course, moves included. A record a line: three for each trace, and their summary is printed.

Needs Linux and root (see docs/lab.md), and a machine with nothing else to do: some 2 hours on 2 cores for all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from paper.lab import run_job
from paper.setting import BATCHES, CONDITIONS, LARGE, ORACLE, EvaluationJob, SpeedChange
from tatami.bench.interleaved import machine
from tatami.errors import LabError

NOTICE, SETTLING = "notice-speeds", "drpm-timed-speeds"
CONTESTANTS = (NOTICE, SETTLING, ORACLE)
QUIET = 20
"""Iterations before the first change, and the least between two."""
SLOWER = (1.25, 1.5, 2.0, 4.0)
GOAL = 1.05


def draw(seed: int, *, iterations: int, num: int) -> tuple[SpeedChange, ...]:
    """Slowdowns of some hosts, one at a time: 40 iterations long in the mean, as long between two."""
    rng = np.random.default_rng(seed)
    speeds = CONDITIONS["A"][:num]
    changes: list[SpeedChange] = []
    at = QUIET + int(rng.exponential(QUIET))
    while at < iterations:
        rank = int(rng.integers(num))
        changes.append(SpeedChange(after_iteration=at, host=f"h{rank}", speed=speeds[rank] / float(rng.choice(SLOWER))))
        at += max(QUIET, int(rng.exponential(2 * QUIET)))
        if at < iterations:
            changes.append(SpeedChange(after_iteration=at, host=f"h{rank}", speed=speeds[rank]))
        at += max(QUIET, int(rng.exponential(2 * QUIET)))
    return tuple(changes)


def job_of(seed: int, *, options: argparse.Namespace) -> EvaluationJob:
    """The course of one trace, all contestants in turn."""
    turn = seed % len(CONTESTANTS)
    return EvaluationJob(
        part="watched",
        condition="A",
        num=options.n,
        net=options.net,
        samples=options.samples,
        contestants=(*CONTESTANTS[turn:], *CONTESTANTS[:turn]),
        serial_s=1.0,
        course=options.iterations,
        trace=draw(seed, iterations=options.iterations, num=options.n),
        seed=seed,
    )


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Courses over the oracle's: of all traces together, with a 95 % interval over the traces, and the worst."""
    courses: dict[int, dict[str, float]] = {}
    for record in records:
        if record["record"] == "traced":
            courses.setdefault(record["seed"], {})[record["contestant"]] = record["total_s"]
    whole = [each for each in courses.values() if len(each) == len(CONTESTANTS)]
    if not whole:
        return "no trace was measured whole"
    lines = [f"{len(whole)} traces; the course of the oracle takes {fmean(each[ORACLE] for each in whole):.1f} s in the mean"]
    for name in CONTESTANTS[:2]:
        ratios = [each[name] / each[ORACLE] for each in whole]
        together = sum(each[name] for each in whole) / sum(each[ORACLE] for each in whole)
        half = 1.96 * float(np.std(ratios, ddof=1)) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        lines.append(f"{name}: {together:.3f} x the oracle's (mean of the traces +- {half:.3f}; worst {max(ratios):.3f})")
    less = sum(each[NOTICE] < each[SETTLING] for each in whole)
    lines.append(
        f"{NOTICE} takes less than {SETTLING} in {less} of {len(whole)} traces; the goal is at most {GOAL} x the oracle's"
    )
    return "\n".join(lines)


def main() -> None:
    options = _options()
    with options.out.open("a", encoding="utf-8") as file:
        for seed in range(options.first, options.first + options.traces):
            job = job_of(seed, options=options)
            print(f"trace {seed}: {len(job.trace)} changes in {job.course} iterations", flush=True)
            try:
                found = run_job(job, cores=options.cores, timeout_s=options.timeout)
            except LabError as error:
                sys.exit(f"watched: {error}")
            for record in found:
                file.write(json.dumps({**record, "seed": seed, "machine": machine()}) + "\n")
                if record["record"] == "traced":
                    print(f"  {record['contestant']:18} {record['total_s']:7.1f} s, {len(record['checks'])} checks", flush=True)
            file.flush()
    print(summary([json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first trace, to go on where a run was stopped")
    parser.add_argument("--iterations", type=int, default=200, help="of each course")
    parser.add_argument("--n", type=int, default=8, help="machines")
    parser.add_argument("--net", default=LARGE)
    parser.add_argument("--samples", type=int, default=BATCHES[LARGE])
    parser.add_argument("--cores", type=float, help="of this machine, for the lab; all where it is left out")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the three courses of a trace")
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file; records are added to it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
