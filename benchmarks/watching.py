"""What watching costs, and how often it moves something for nothing:  python benchmarks/watching.py [--out FILE.jsonl]

Cost: CPU time (`time.process_time`) of `Watcher.take`, which every rank runs in every iteration, of what a rank tells and
hears, and what travels; 8 ranks in two replicas, on one host, and on 8 hosts, so that links are watched too. Beside it the
share of an iteration of 50 ms.

Quiet: runs of 10,000 iterations of 8 equal ranks in which nothing happens but noise and stalls, through `Watcher` with its
planner and prices; alarms and re-tilings are counted. Arithmetic from seeds 0, 1, ...: these figures do not depend on the
machine.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tatami.bench.interleaved import machine
from tatami.cluster import NETWORK_LINK, Cluster, Processor
from tatami.retiling import Retiler, Watcher
from tatami.retiling.thresholds import FALSE_ALARMS
from tatami.tiling import Layout, Replica
from tatami.workload import Workload

RANKS, ITERATION_S, GOAL = 8, 0.05, 0.005
WORK = Workload.mlp(203, 800, 26, samples=8192)
NOISES = (0.02, 0.05, 0.10)
REPEATS = 5
Array = NDArray[np.float64]


def watcher(*, hosts: bool) -> Watcher:
    """Of 8 equal ranks in two replicas, on hosts of their own or on one."""
    names = tuple(f"p{rank}" for rank in range(RANKS))
    cluster = Cluster(
        processors=tuple(Processor(name=name, speed=1e9, host=f"h{rank}" if hosts else "h") for rank, name in enumerate(names))
    )
    half = RANKS // 2
    replicas = tuple(Replica(width=0.5, processors=own, heights=(1 / half,) * half) for own in (names[:half], names[half:]))
    return Watcher(Retiler(), cluster=cluster, workload=WORK, layout=Layout(replicas=replicas), known_speeds=True)


def quiet_times(noise: float, *, iterations: int, seed: int) -> Array:
    """Seconds per work, (iterations, ranks): normal noise, and one in a hundred three times as long."""
    rng = np.random.default_rng(seed)
    shape = (iterations, RANKS)
    times: Array = np.exp(noise * rng.standard_normal(shape)) * np.where(rng.random(shape) < 0.01, 3.0, 1.0)
    return times * (WORK.work_flop / 1e9)


def late_times(watched: Watcher, noise: float, *, iterations: int, seed: int) -> Array:
    """Of every watched message how long it took, (iterations, messages)."""
    expected_s = np.array([message.expected_s for message in watched.links.messages])
    rng = np.random.default_rng([seed, 1])
    return expected_s * np.exp(noise * rng.standard_normal((iterations, len(expected_s))))


def quiet(noise: float, *, iterations: int, seed: int, hosts: bool = True) -> tuple[int, int]:
    """Alarms and re-tilings of a run in which nothing happens."""
    watched = watcher(hosts=hosts)
    late_s = late_times(watched, noise, iterations=iterations, seed=seed)
    remaps = 0
    for iteration, values in enumerate(quiet_times(noise, iterations=iterations, seed=seed), start=1):
        late = late_s[iteration - 1]
        decision = watched.take(iteration, values, late_s=late if len(late) == len(watched.links.messages) else ())
        remaps += decision is not None and decision.remaps
    return len(watched.alarms), remaps


def cost(*, iterations: int, hosts: bool) -> dict[str, Any]:
    """CPU seconds of an iteration: medians of repetitions, each with a watcher of its own."""
    watching_s, telling_s, num_messages = [], [], 0
    for seed in range(REPEATS):
        watched = watcher(hosts=hosts)
        num_messages = len(watched.links.messages)
        values = quiet_times(0.05, iterations=iterations, seed=seed)
        late_s = late_times(watched, 0.05, iterations=iterations, seed=seed).tolist()
        began_s = time.process_time()
        for iteration in range(iterations):
            watched.take(iteration + 1, values[iteration], late_s=late_s[iteration])
        watching_s.append((time.process_time() - began_s) / iterations)
        # What a rank does to tell and to hear: a list of so many numbers, to an array and back.
        began_s = time.process_time()
        for iteration in range(iterations):
            table = [0.0] * (2 * RANKS) + [0.0 for _ in watched.links.messages]
            table[iteration % RANKS] = 1.0
            np.array(np.array(table).tolist()[:RANKS])
        telling_s.append((time.process_time() - began_s) / iterations)
    size_bytes = 8 * (2 * RANKS + num_messages)
    return {
        "record": "cost",
        "ranks": RANKS,
        "watched_messages": num_messages,
        "cpu_s": median(watching_s),
        "cpu_s_of_repetitions": watching_s,
        "telling_cpu_s": median(telling_s),
        "size_bytes": size_bytes,
        "wire_s": size_bytes / NETWORK_LINK.bandwidth_bytes_per_s,
        "share_of_50_ms": (median(watching_s) + median(telling_s)) / ITERATION_S,
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=20, help="quiet runs of each noise")
    parser.add_argument("--out", type=Path, help="a .jsonl file")
    options = parser.parse_args()
    records = [cost(iterations=options.iterations, hosts=hosts) for hosts in (False, True)]
    for found in records:
        print(
            f"an iteration: {1e6 * found['cpu_s']:.0f} us of CPU to watch {RANKS} ranks and {found['watched_messages']} "
            f"messages, {1e6 * found['telling_cpu_s']:.0f} us to tell and hear {found['size_bytes']} bytes "
            f"({1e6 * found['wire_s']:.1f} us of a 1 Gbit/s link): {found['share_of_50_ms']:.2%} of 50 ms; the goal is below "
            f"{GOAL:.1%}"
        )
    for noise in NOISES:
        runs = [quiet(noise, iterations=options.iterations, seed=seed) for seed in range(options.seeds)]
        alarms, remaps = (sum(values) for values in zip(*runs, strict=True))
        num = options.seeds * options.iterations
        records.append({"record": "quiet", "noise": noise, "iterations": num, "alarms": alarms, "remaps": remaps})
        print(
            f"quiet, {noise:.0%} noise: {alarms} alarms and {remaps} re-tilings in {num:,} iterations "
            f"({2 * FALSE_ALARMS * num:.1f} alarms are expected, of ranks and of links)"
        )
    if options.out:
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
