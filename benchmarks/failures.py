"""What failures cost the paper's parameter server, in closed form and drawn:  python benchmarks/failures.py --out FILE

Draws the lives of workers as `tatami simulate server --preset paper-server-10k` does, seeds 0, 1, 2, ..., and follows only what
a failure changes: how much was computed of the round in which it falls, and what is done again. A test holds the numbers
against the simulator, run by run. Arithmetic from a seed: nothing is timed, and the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tatami.server.recovery import YEAR_S
from tatami.sim.server.lifetimes import life_s


@dataclass(frozen=True, kw_only=True)
class PaperServer:
    """The paper's system, in the times that one undisturbed simulated round shows.

    Attributes:
        workers, rounds: of a run; 200 in 10,000 compute as many hours as 10,000 in 200.
        mtbf_s: mean life of a worker.
        round_s, computing_s, pull_s: of a round, of its computing, and of all workers' pull.
        respawn_s: a spare's start, 5 s, and its pull of 1 GB while no other worker pulls.
        read_s: of a checkpoint of 8 GB from the worker's own disk.
    """

    workers: int = 200
    rounds: int = 10_000
    mtbf_s: float = 3 * YEAR_S
    round_s: float = 143.3523100721
    computing_s: float = 100.0
    pull_s: float = 21.6761550361
    respawn_s: float = 13.6874
    read_s: float = 8.0

    @property
    def expected_failures(self) -> float:
        """Of a run: lives are exponential, so that failures are a Poisson process."""
        return self.workers * self.rounds * self.round_s / self.mtbf_s

    def expected_s(self, recovery: str) -> float:
        """Lost to a failure: it strikes half-way through the computing, on average."""
        half_s = self.computing_s / 2
        return {
            "checkpoint": self.pull_s + half_s + self.read_s,
            "servers, continue": self.respawn_s,
            "servers, restart": self.respawn_s + half_s,
        }[recovery]


RECOVERIES = ("checkpoint", "servers, continue", "servers, restart")


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Of one run."""

    failures: int
    lost_s: float


def drawn(server: PaperServer, recovery: str, *, seed: int) -> Lost:
    """One run of `recovery`, one of `RECOVERIES`."""
    return _with_checkpoints(server, seed) if recovery == "checkpoint" else _from_servers(server, seed, recovery)


def _lives(server: PaperServer, seed: int, worker: int) -> Iterator[float]:
    """How long the holders of a place compute, one after the other."""
    generation = 0
    while True:
        lasts_s = life_s(server.mtbf_s, seed=seed, kind="worker", number=worker, generation=generation)
        yield lasts_s * server.computing_s / server.round_s
        generation += 1


def _from_servers(server: PaperServer, seed: int, recovery: str) -> Lost:
    """Each place has a clock of its own; a round waits for the slowest of its places."""
    failures = 0
    delays_s: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for worker in range(server.workers):
        computed_s = redone_s = 0.0
        for life in _lives(server, seed, worker):
            computed_s += life
            useful_s = computed_s - redone_s
            if useful_s >= server.rounds * server.computing_s:
                break
            failures += 1
            number, of_task_s = divmod(useful_s, server.computing_s)
            again_s = of_task_s if recovery.endswith("restart") else 0.0
            redone_s += again_s
            delays_s[int(number)][worker] += server.respawn_s + again_s
    return Lost(failures=failures, lost_s=sum(max(places.values()) for places in delays_s.values()))


def _with_checkpoints(server: PaperServer, seed: int) -> Lost:
    """All places compute together, and do the round again together."""
    lives = [_lives(server, seed, worker) for worker in range(server.workers)]
    ends = [(next(each), worker) for worker, each in enumerate(lives)]
    heapq.heapify(ends)
    failures, redone_s, lost_s = 0, 0.0, 0.0
    while ends[0][0] - redone_s < server.rounds * server.computing_s:
        at_s, worker = ends[0]
        of_task_s = (at_s - redone_s) % server.computing_s
        failures += 1
        redone_s += of_task_s
        lost_s += server.pull_s + of_task_s + server.read_s
        heapq.heapreplace(ends, (at_s + next(lives[worker]), worker))
    return Lost(failures=failures, lost_s=lost_s)


def with_interval(values: Sequence[float], *, over: Sequence[float] | None = None) -> tuple[float, float]:
    """Mean, or ratio of the sums, and half the width of its 95 % interval (normal; of a ratio by the delta method)."""
    below = over or [1.0] * len(values)
    ratio = sum(values) / sum(below)
    residuals = [value - ratio * each for value, each in zip(values, below, strict=True)]
    return ratio, 1.96 * statistics.stdev(residuals) / math.sqrt(len(values)) / statistics.fmean(below)


def measured(server: PaperServer, *, seeds: int) -> dict[str, object]:
    """Closed form beside what was drawn, for each recovery."""
    table = []
    for recovery in RECOVERIES:
        runs = [drawn(server, recovery, seed=seed) for seed in range(seeds)]
        counts, times = [float(run.failures) for run in runs], [run.lost_s for run in runs]
        mean, mean_within = with_interval(counts)
        lost_s, lost_within_s = with_interval(times, over=counts)
        table.append(
            {
                "recovery": recovery,
                "failures": sum(run.failures for run in runs),
                "expected_failures_per_run": server.expected_failures,
                "failures_per_run": mean,
                "failures_per_run_within": mean_within,
                "expected_s_per_failure": server.expected_s(recovery),
                "lost_s_per_failure": lost_s,
                "lost_s_per_failure_within": lost_within_s,
                "deviation_of_a_run_s": statistics.stdev(times),
            }
        )
    return {"command": "python benchmarks/failures.py", "seeds": seeds, "server": asdict(server), "recoveries": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(measured(PaperServer(), seeds=options.seeds), indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
