"""Courses with machines that become slow, in labs:  python benchmarks/watched.py --out benchmarks/results/watched.jsonl

Each trace is a course over the paper's machines of condition A, of which some become slower for a while. In one lab run, one
after the other: the rule of `Retiler()` ("notice"), the settling rule, and an oracle that is told every change and lays the
tiles for it at once; who is first changes from trace to trace. All start from speeds and costs of messages that were measured
just before, and sum the loss in every iteration as the Trainer does, with which the times go that the rule watches. What counts
is the whole course, moves included. Three records for each trace are added to the file when all its courses are done; a trace
that is there is not run again, so any part can be run at any time (`--traces 0-4`), and `--summary FILE` says what is there.

Needs Linux and root (see docs/lab.md), and a machine with nothing else to do: on 2 cores some 2 minutes a trace, 40 for all 20.

So that it is no longer than that:

- Five traces share a lab: its start, the measuring of its links, and the first iterations. Their processors are measured for
  each trace, and no rank trains alone, which nothing here is compared with.
- A course has 120 iterations: the beginning of the trace that a longer course with this seed has too, so changes come as often
  for each iteration, and 20 traces together still have some 40 of them.
- An iteration has half the samples of the paper's evaluation, and takes some 0.3 s. What a look, a plan, a move and a message
  take remains the same number of seconds. So the rule is charged twice as many iterations for its looks, which the oracle has
  not, and waits as much longer before a move pays; and an imbalance is a somewhat smaller part of an iteration, for all three.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from paper.lab import run_job
from paper.setting import BATCHES, CONDITIONS, LARGE, ORACLE, EvaluationJob, SlowTrace, SpeedChange
from tatami.bench.interleaved import machine
from tatami.errors import LabError

NOTICE, SETTLING = "notice-speeds", "drpm-timed-speeds"
CONTESTANTS = (NOTICE, SETTLING, ORACLE)
QUIET = 20
"""Iterations before the first change, and the least between two."""
SLOWER = (1.25, 1.5, 2.0, 4.0)
GOAL = 1.05
TRACES = 20
PER_LAB = 5
_START_S = 300.0
"""Within which a lab is there, its links are measured, and all ranks have trained a little."""
_SETTING = ("net", "samples", "num", "condition", "bandwidth_bytes_per_s")


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


def job_of(seeds: Sequence[int], *, options: argparse.Namespace) -> EvaluationJob:
    """What one lab measures: of each of these traces the courses of all contestants in turn."""
    return EvaluationJob(
        part="watched",
        condition="A",
        num=options.n,
        net=options.net,
        samples=options.samples,
        contestants=(),
        course=options.iterations,
        traces=tuple(
            SlowTrace(
                seed=seed,
                changes=draw(seed, iterations=options.iterations, num=options.n),
                contestants=(*CONTESTANTS[seed % 3 :], *CONTESTANTS[: seed % 3]),
            )
            for seed in seeds
        ),
    )


def whole_traces(records: Iterable[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Seconds of the courses by seed and contestant, of traces that all contestants went through."""
    courses: dict[int, dict[str, float]] = {}
    for record in records:
        if record["record"] == "traced":
            courses.setdefault(record["seed"], {})[record["contestant"]] = record["total_s"]
    return {seed: each for seed, each in sorted(courses.items()) if len(each) == len(CONTESTANTS)}


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Courses over the oracle's: of all traces together, with a 95 % interval over the traces, and the worst."""
    whole = list(whole_traces(records).values())
    if not whole:
        return "no trace was measured whole"
    oracle_s = fmean(each[ORACLE] for each in whole)
    lines = [f"{len(whole)} of {TRACES} traces; the course of the oracle takes {oracle_s:.1f} s in the mean"]
    for name in CONTESTANTS[:2]:
        ratios = [each[name] / each[ORACLE] for each in whole]
        together = sum(each[name] for each in whole) / sum(each[ORACLE] for each in whole)
        half = 1.96 * float(np.std(ratios, ddof=1)) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        lines.append(f"{name}: {together:.3f} x the oracle's (mean of the traces +- {half:.3f}; worst {max(ratios):.3f})")
    less = sum(each[NOTICE] < each[SETTLING] for each in whole)
    free = [record for record in records if record["record"] == "traced" and record["contestant"] == ORACLE]
    told_s = fmean(record["told_moves_s"] for record in free if record["seed"] in whole_traces(records))
    ratio = fmean(each[NOTICE] for each in whole) / (oracle_s - told_s)
    lines.append(
        f"{NOTICE}: {ratio:.3f} x that of an oracle whose own planning and moves, {told_s:.1f} s in the mean, cost nothing"
    )
    lines.append(
        f"{NOTICE} takes less than {SETTLING} in {less} of {len(whole)} traces; the goal is at most {GOAL} x the oracle's"
    )
    return "\n".join(lines)


def parse_seeds(text: str) -> range:
    """`0-4` as 0, 1, 2, 3, 4, and `7` as 7.

    Raises:
        ValueError: it is neither.
    """
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def run(options: argparse.Namespace) -> None:
    """Measure the traces that the file lacks."""
    records = read(options.out)
    asked = job_of([], options=options)
    for record in records:
        other = {name: record[name] for name in _SETTING if record[name] != getattr(asked, name)}
        if len(record["iteration_s"]) != options.iterations:
            other["iterations"] = len(record["iteration_s"])
        if other:
            sys.exit(f"watched: {options.out} has courses with {other}, which do not compare with these; give another --out")
    missing = [seed for seed in options.traces if seed not in whole_traces(records)]
    print(f"{len(missing)} of {len(options.traces)} traces to run", flush=True)
    with options.out.open("a", encoding="utf-8") as file:
        kept: list[str] = []

        def told(record: dict[str, Any]) -> None:
            if record["record"] != "traced":
                return
            changes, decisions = len(record["trace"]), len(record["checks"])
            head = f"trace {record['seed']}, {changes} changes: {record['contestant']:18}"
            print(f"{head} {record['total_s']:6.1f} s, {decisions} decisions", flush=True)
            kept.append(json.dumps({**record, "machine": machine()}) + "\n")
            if len(kept) == len(CONTESTANTS):
                file.writelines(kept)
                file.flush()
                kept.clear()

        for at in range(0, len(missing), PER_LAB):
            job = job_of(missing[at : at + PER_LAB], options=options)
            try:
                run_job(job, cores=options.cores, timeout_s=_START_S + options.timeout * len(job.traces), told=told)
            except LabError as error:
                sys.exit(f"watched: {error}")


def read(path: Path) -> list[dict[str, Any]]:
    """The records so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main() -> None:
    options = _options()
    if options.summary is None:
        run(options)
    print(summary(read(options.summary or options.out)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=parse_seeds, default=range(TRACES), help="which, such as 0-4 or 7; all are 0-19")
    parser.add_argument("--iterations", type=int, default=120, help="of each course")
    parser.add_argument("--n", type=int, default=8, help="machines")
    parser.add_argument("--net", default=LARGE)
    parser.add_argument("--samples", type=int, default=BATCHES[LARGE] // 2)
    parser.add_argument("--cores", type=float, help="of this machine, for the lab; all where it is left out")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the three courses of a trace")
    parser.add_argument("--out", type=Path, help="a .jsonl file; records are added to it")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="only say what is in this file")
    options = parser.parse_args()
    if (options.out is None) == (options.summary is None):
        parser.error("give --out to measure, or --summary to read")
    return options


if __name__ == "__main__":
    main()
